//! Reads a device's clock and memory after all queued work is done.

use std::time::Instant;

use brimful_torch::device::synchronize;
use tch::Device;

use crate::Result;
use crate::memory::Memory;

pub(super) struct Meter {
    pub(super) memory: Memory,
    pub(super) device: Device,
}

impl Meter {
    pub(super) fn of(device: Device) -> Result<Self> {
        Ok(Self { memory: Memory::of(device)?, device })
    }

    pub(super) fn in_use(&self) -> Result<u64> {
        synchronize(self.device)?;
        Ok(self.memory.usage()?.current.0)
    }

    /// Returns the result of `work`, and the peak bytes beyond `before` while it runs.
    pub(super) fn weighed<T>(
        &self,
        before: u64,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<(T, u64)> {
        synchronize(self.device)?;
        self.memory.reset_peak()?;
        let result = work()?;
        synchronize(self.device)?;
        Ok((result, self.memory.usage()?.peak.0.saturating_sub(before)))
    }

    /// Returns the result of `work`, and the seconds until the device has done it.
    pub(super) fn timed<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<(T, f64)> {
        synchronize(self.device)?;
        let start = Instant::now();
        let result = work()?;
        synchronize(self.device)?;
        Ok((result, start.elapsed().as_secs_f64()))
    }
}
