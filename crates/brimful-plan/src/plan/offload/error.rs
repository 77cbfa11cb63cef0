//! Errors of placing stages on devices and host.

use thiserror::Error;

use crate::bytes::Bytes;
use crate::schedule::{CostError, DeviceId, ScheduleError, StageId};

/// Error for stages that do not fit, or of a request.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum OffloadError {
    /// Too little device memory even with one device buffer, everything recomputed and all boundaries
    /// offloaded.
    #[error(
        "device {device} needs {} and has {}, with {} everything recomputed and boundaries on the host: \
         stage {stage} is its largest; cut it finer, or use smaller micro-batches",
        Bytes(*.needed), Bytes(*.memory),
        if *.fetched { "one device buffer for offloaded weights," } else { "the weights on the device," }
    )]
    DeviceTooSmall {
        /// Number of the device.
        device: DeviceId,
        /// Stage that takes most of its memory.
        stage: StageId,
        /// Peak bytes.
        needed: u64,
        /// Bytes that it has.
        memory: u64,
        /// Whether weights could be offloaded.
        fetched: bool,
    },
    /// Too little host memory for the stages that do not fit on the devices.
    #[error(
        "the host needs {} for the stages that do not fit on their devices, and has {}: use a larger host, \
         more devices, or an optimizer with less state",
        Bytes(*.needed), Bytes(*.memory)
    )]
    HostTooSmall {
        /// Bytes that would be offloaded.
        needed: u64,
        /// Bytes that the host has.
        memory: u64,
    },
    /// Schedule that cannot be made.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// Costs that cannot be simulated, or transfers that cannot be made.
    #[error(transparent)]
    Cost(#[from] CostError),
}
