//! Streams of devices: events that measure time, fences between threads' work, and copies on streams of their own.

mod copies;
mod fence;
mod timed_event;

pub(crate) use copies::{Arriving, CopyStreams};
pub(crate) use fence::{StreamFence, accelerators};
pub(crate) use timed_event::TimedEvent;
