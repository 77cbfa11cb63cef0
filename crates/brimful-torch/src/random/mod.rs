//! Random number generators: saved and restored state, and a thread-local generator.

mod own_generator;

use tch::{Device, Tensor};

use crate::device::number;
use crate::error::TorchError;
use crate::{ffi, owned, raw};

pub use own_generator::OwnGenerator;

/// State of a device's default generator.
#[derive(Debug, PartialEq)]
pub struct GeneratorState(Tensor);

/// Returns the state of the device's default generator.
///
/// # Errors
/// When the device does not exist.
pub fn generator_state(device: Device) -> Result<GeneratorState, TorchError> {
    let index = number(device)?;
    // SAFETY: takes a plain number.
    unsafe { ffi::brimful_generator_state(index) }.map(|state| GeneratorState(owned(state)))
}

/// Restores the state of the device's default generator.
///
/// # Errors
/// When the device does not exist, or the state belongs to another kind of device.
pub fn set_generator_state(device: Device, state: &GeneratorState) -> Result<(), TorchError> {
    let index = number(device)?;
    // SAFETY: the state is a valid tensor.
    unsafe { ffi::brimful_set_generator_state(index, raw(&state.0)) }
}

/// Seeds the default generator of this device only; `tch::manual_seed` seeds those of all devices.
///
/// # Errors
/// When the device does not exist.
pub fn seed_generator(device: Device, seed: u64) -> Result<(), TorchError> {
    let index = number(device)?;
    // SAFETY: takes plain numbers.
    unsafe { ffi::brimful_seed_generator(index, seed) }
}
