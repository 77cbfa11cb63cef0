//! A step's seed, and random state that is as before where it should be.

use tch::Device;

use super::device::StageDevice;
use crate::Result;
use crate::random::{self, Randomness};

/// Runs `f` with a seed for the step; if it fails, as if none had been drawn.
pub(crate) fn drawing<T>(devices: &[StageDevice], f: impl FnOnce(u64) -> Result<T>) -> Result<T> {
    undisturbed(devices, || {
        let before = Randomness::now(Device::Cpu)?;
        let result = f(random::step_seed()?);
        if result.is_err() {
            before.restore()?;
        }
        result
    })
}

/// Runs `f`; the accelerators' own generators, which the stages seed as they need, are as before
/// afterwards.
pub(crate) fn undisturbed<T>(devices: &[StageDevice], f: impl FnOnce() -> Result<T>) -> Result<T> {
    let all = devices.iter().map(|device| device.device);
    let accelerators = Randomness::of(all.filter(|device| *device != Device::Cpu).collect())?;
    let result = f();
    accelerators.restore()?;
    result
}
