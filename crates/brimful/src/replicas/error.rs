//! Errors of building replicas.

use tch::Device;
use thiserror::Error;

use crate::workers::DeviceSpec;
use crate::{Result, device};

/// Replicas that cannot be built.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum ReplicasError {
    /// No device for a replica.
    #[error("there is no device to put a replica on: name at least one")]
    NoDevices,
    /// Two replicas on one accelerator.
    #[error(
        "{device} is given twice: two replicas on it would only share its memory and take turns; \
         name each accelerator once"
    )]
    SameDevice {
        /// Name of the accelerator.
        device: String,
    },
    /// Replicas of different models.
    #[error(
        "replica {replica} differs from the first: '{variable}' is {here} in replica {replica} and {first} \
         in the first; let the closure build the same model on every device"
    )]
    ModelsDiffer {
        /// Index of the replica, from 0.
        replica: usize,
        /// First variable that differs.
        variable: String,
        /// Description of the variable in the first replica.
        first: String,
        /// Description of the variable in this replica.
        here: String,
    },
    /// Another number of speeds than of replicas.
    #[error("{given} speeds are given for {replicas} replicas: give one per replica")]
    SpeedsCount {
        /// Number of speeds given.
        given: usize,
        /// Number of replicas.
        replicas: usize,
    },
    /// Speed that is not a finite number above 0.
    #[error("the speed of replica {replica} cannot be {speed}: give a finite number above 0")]
    BadSpeed {
        /// Index of the replica, from 0.
        replica: usize,
        /// Speed given.
        speed: f64,
    },
}

/// Checks that there is a device, and that no accelerator is given twice.
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
