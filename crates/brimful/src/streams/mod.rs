//! Streams of devices: events that measure time, fences between threads' work, and copies on streams of their own.

mod copies;
mod fence;

use std::time::{Duration, Instant};

use brimful_torch::stream::{Event, Stream};
use tch::Device;

pub(crate) use copies::{Arriving, CopyStreams};
pub(crate) use fence::{StreamFence, accelerators};

use crate::Result;

/// Completion of all work that has been queued so far.
#[derive(Debug)]
pub(crate) enum TimedEvent {
    Host(Instant),
    Stream(Event),
}

impl TimedEvent {
    pub(crate) fn now(device: Device) -> Result<Self> {
        if device == Device::Cpu {
            return Ok(Self::Host(Instant::now()));
        }
        Ok(Self::Stream(Event::after(Stream::current(device)?)?))
    }

    /// Waits until the event is reached.
    pub(crate) fn wait(&self) -> Result<()> {
        match self {
            Self::Host(_) => Ok(()),
            Self::Stream(event) => Ok(event.synchronize()?),
        }
    }

    /// Returns the time since an earlier event on the same device. Both events must have been reached.
    pub(crate) fn since(&self, earlier: &Self) -> Result<Duration> {
        match (earlier, self) {
            (Self::Host(earlier), Self::Host(now)) => Ok(now.saturating_duration_since(*earlier)),
            (Self::Stream(earlier), Self::Stream(now)) => Ok(earlier.elapsed(now)?),
            _ => unreachable!("both are of one device"),
        }
    }

    /// Returns the seconds since an earlier event; waits for this one.
    pub(crate) fn seconds_since(&self, earlier: &Self) -> Result<f64> {
        self.wait()?;
        Ok(self.since(earlier)?.as_secs_f64())
    }
}
