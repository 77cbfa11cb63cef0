//! Why replicas cannot be built.

use tch::Device;
use thiserror::Error;

use crate::workers::DeviceSpec;
use crate::{Result, device};

/// Replicas that cannot be built.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum ReplicasError {
    /// Replicas on nothing.
    #[error("there is no device to put a replica on: name at least one")]
    NoDevices,
    /// Two replicas on one accelerator.
    #[error(
        "{device} is given twice: two replicas on it would only share its memory and take turns; \
         name each accelerator once"
    )]
    SameDevice {
        /// Its name.
        device: String,
    },
    /// Replicas of different models.
    #[error(
        "replica {replica} is another model than the first: '{variable}' is {here} there and {first} \
         in the first; let the closure build the same on every device"
    )]
    ModelsDiffer {
        /// Which one, counted from 0.
        replica: usize,
        /// The first variable that differs.
        variable: String,
        /// What the first replica has.
        first: String,
        /// What this one has.
        here: String,
    },
    /// Speeds that are not one a replica.
    #[error("{given} speeds are given for {replicas} replicas: give one each")]
    SpeedsCount {
        /// How many were given.
        given: usize,
        /// How many replicas there are.
        replicas: usize,
    },
    /// A speed that nothing can be divided by.
    #[error("the speed of replica {replica} cannot be {speed}: give a finite number above 0")]
    BadSpeed {
        /// Which one, counted from 0.
        replica: usize,
        /// What was given.
        speed: f64,
    },
}

/// There is a device, and no accelerator twice.
pub(super) fn check(devices: &[DeviceSpec]) -> Result<()> {
    if devices.is_empty() {
        return Err(ReplicasError::NoDevices.into());
    }
    for (index, DeviceSpec { device, .. }) in devices.iter().enumerate() {
        let before = devices[..index].iter().any(|other| other.device == *device);
        if *device != Device::Cpu && before {
            return Err(ReplicasError::SameDevice { device: device::name(*device) }.into());
        }
    }
    Ok(())
}

pub(super) fn check_speeds(speeds: &[f64], replicas: usize) -> Result<()> {
    let given = speeds.len();
    if given != replicas {
        return Err(ReplicasError::SpeedsCount { given, replicas }.into());
    }
    match speeds.iter().position(|speed| !(speed.is_finite() && *speed > 0.0)) {
        Some(replica) => Err(ReplicasError::BadSpeed { replica, speed: speeds[replica] }.into()),
        None => Ok(()),
    }
}
