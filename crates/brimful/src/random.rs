//! Random state that can be put back, so that a failed step draws no numbers.

use brimful_torch::random::{GeneratorState, generator_state, set_generator_state};
use tch::Device;

use crate::Result;

/// Where the generators of a device and of the CPU stood.
#[derive(Debug, PartialEq)]
pub(crate) struct Randomness {
    states: Vec<(Device, GeneratorState)>,
}

impl Randomness {
    /// Takes note of the device's generator and the CPU's.
    pub(crate) fn now(device: Device) -> Result<Self> {
        let mut devices = vec![Device::Cpu];
        devices.extend((device != Device::Cpu).then_some(device));
        let state = |device| Ok((device, generator_state(device)?));
        Ok(Self { states: devices.into_iter().map(state).collect::<Result<_>>()? })
    }

    /// Puts them back to where they stood.
    pub(crate) fn restore(&self) -> Result<()> {
        for (device, state) in &self.states {
            set_generator_state(*device, state)?;
        }
        Ok(())
    }
}
