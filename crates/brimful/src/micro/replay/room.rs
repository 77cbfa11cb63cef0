//! The memory that captured work runs in, which no tensor's account shows while it is replayed.

use brimful_torch::memory::{DeviceMemory, device_memory, reset_peak};
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
    before: DeviceMemory,
}

impl Watch {
    pub(super) fn begin(device: Device) -> Result<Self> {
        let before = device_memory(device)?;
        reset_peak(device)?;
        Ok(Self { device, before })
    }
}

impl Room {
    /// Counts what was allocated since, by a capture that allocates all that its replays will use.
    pub(super) fn add(&mut self, watch: &Watch) -> Result<()> {
        let peak = device_memory(watch.device)?.peak;
        self.needed = self.needed.max(peak.saturating_sub(watch.before.current));
        self.interrupted = self.interrupted.max(watch.before.peak).max(peak);
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
