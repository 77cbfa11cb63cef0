//! The memory that captured work runs in, which no tensor's account shows while it is replayed.

use brimful_torch::memory::{device_memory, reset_peak};
use tch::Device;

use crate::Result;
use crate::bytes::Bytes;

/// What captured work needs. Its parts are never replayed at the same time, so they share one pool.
#[derive(Debug, Default)]
pub(super) struct Room {
    /// The most that any of it has in use.
    needed: u64,
    /// The peak of a step that a capture interrupted.
    interrupted: u64,
}

/// A look at the device before a capture.
#[derive(Debug)]
pub(super) struct Watch {
    device: Device,
    /// The step's peak so far.
    before: u64,
}

impl Watch {
    pub(super) fn begin(device: Device) -> Result<Self> {
        let before = device_memory(device)?.peak;
        reset_peak(device)?;
        Ok(Self { device, before })
    }
}

impl Room {
    /// Counts what a capture has allocated, which is what its replays will use; of one that failed,
    /// nothing remains. What it keeps is among what is in use.
    pub(super) fn add(&mut self, watch: &Watch, succeeded: bool) -> Result<()> {
        let now = device_memory(watch.device)?;
        if succeeded {
            self.needed = self.needed.max(now.peak.saturating_sub(now.current));
        }
        self.interrupted = self.interrupted.max(watch.before).max(now.peak);
        // What was counted here is not to be counted again as the step's.
        Ok(reset_peak(watch.device)?)
    }

    pub(super) fn needed(&self) -> Bytes {
        Bytes(self.needed)
    }

    pub(super) fn take_peak(&mut self, usage: Bytes) -> Bytes {
        Bytes(std::mem::take(&mut self.interrupted).max(usage.0 + self.needed))
    }
}
