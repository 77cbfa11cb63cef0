//! A moment in a device's work: by the clock on a CPU, by an event where work is queued.

use std::time::{Duration, Instant};

use brimful_torch::stream::{Event, Stream};
use tch::Device;

use crate::Result;

/// When the work that was begun so far is done.
#[derive(Debug)]
pub(crate) enum Moment {
    Host(Instant),
    Queued(Event),
}

impl Moment {
    pub(crate) fn now(device: Device) -> Result<Self> {
        if device == Device::Cpu {
            return Ok(Self::Host(Instant::now()));
        }
        Ok(Self::Queued(Event::after(Stream::current(device)?)?))
    }

    /// Waits until it has come.
    pub(crate) fn wait(&self) -> Result<()> {
        match self {
            Self::Host(_) => Ok(()),
            Self::Queued(event) => Ok(event.synchronize()?),
        }
    }

    /// The time since an earlier one of the same device. Both must have come.
    pub(crate) fn since(&self, earlier: &Self) -> Result<Duration> {
        match (earlier, self) {
            (Self::Host(earlier), Self::Host(now)) => Ok(now.saturating_duration_since(*earlier)),
            (Self::Queued(earlier), Self::Queued(now)) => Ok(earlier.elapsed(now)?),
            _ => unreachable!("both are of one device"),
        }
    }

    /// The same in seconds, once it has come.
    pub(crate) fn seconds_since(&self, earlier: &Self) -> Result<f64> {
        self.wait()?;
        Ok(self.since(earlier)?.as_secs_f64())
    }
}
