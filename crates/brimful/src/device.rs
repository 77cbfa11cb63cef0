//! Devices of this machine, by name.
//!
//! ```
//! use brimful::device;
//!
//! let device = device::find("cpu")?; // or cuda, cuda:1
//! assert_eq!(device::name(device), "cpu");
//! assert!(device::find("cuda:99").is_err());
//! # Ok::<(), brimful::Error>(())
//! ```

use std::ops::Range;

use brimful_torch::cuda;
use tch::Device;

use crate::{Error, Result};

/// Returns the device of this name: `cpu`, `cuda` (the first one) or `cuda:1`. Loads CUDA if need be.
///
/// # Errors
/// When the machine has no such device.
pub fn find(name: &str) -> Result<Device> {
    let index = match name {
        "cpu" => return Ok(Device::Cpu),
        "cuda" => Some(0),
        _ => name.strip_prefix("cuda:").and_then(|index| index.parse().ok()),
    };
    match index {
        Some(index) if index < cuda::device_count() => Ok(Device::Cuda(index)),
        _ => Err(no_device(name)),
    }
}

/// Returns devices of this name for several stages or ranks of one machine. For `cuda`, each stage or rank gets a
/// GPU of its own, and GPUs are shared in turn if there are too few. For `cpu` or `cuda:1`, all get that device.
/// Loads CUDA if need be.
///
/// # Errors
/// When the machine has no such device.
pub fn spread(name: &str, places: Range<usize>) -> Result<Vec<Device>> {
    let first = find(name)?;
    let number = |place: usize| match name {
        "cuda" => Device::Cuda(place % cuda::device_count()),
        _ => first,
    };
    Ok(places.map(number).collect())
}

/// Lists the devices of this machine, the CPU first. Loads CUDA if need be.
pub fn all() -> Vec<Device> {
    let accelerators = (0..cuda::device_count()).map(Device::Cuda);
    std::iter::once(Device::Cpu).chain(accelerators).collect()
}

/// Returns the first CUDA device, or the CPU if there is none. Loads CUDA if need be.
pub fn best() -> Device {
    if cuda::device_count() > 0 { Device::Cuda(0) } else { Device::Cpu }
}

/// Returns the name by which [`find`] finds this device.
pub fn name(device: Device) -> String {
    match device {
        Device::Cuda(index) => format!("cuda:{index}"),
        other => format!("{other:?}").to_lowercase(),
    }
}

/// Joins names of devices, such as `cpu+cuda:0`.
pub(crate) fn names(devices: impl IntoIterator<Item = Device>) -> String {
    devices.into_iter().map(name).collect::<Vec<_>>().join("+")
}

fn no_device(asked: &str) -> Error {
    let available: Vec<_> = all().into_iter().map(name).collect();
    let hint = if asked.starts_with("cuda") && cuda::load().is_err() {
        " (CUDA could not be loaded: `brimful doctor` says why)"
    } else {
        ""
    };
    Error::NoDevice { asked: asked.into(), available: available.join(", "), hint: hint.into() }
}

/// Allows CUDA to compute f32 matrix products and convolutions in TF32: several times faster, with a mantissa of
/// 10 instead of 23 bits. Applies to the whole process; by default libtorch allows it for convolutions only.
///
/// # Errors
///
/// When libtorch refuses, as it does if the process has set its newer option `fp32_precision`.
pub fn allow_tf32(allowed: bool) -> Result<()> {
    Ok(cuda::allow_tf32(allowed)?)
}

/// Returns whether CUDA may compute f32 convolutions in TF32.
///
/// # Errors
/// As [`allow_tf32`].
pub fn allows_tf32() -> Result<bool> {
    Ok(cuda::allows_tf32()?)
}
