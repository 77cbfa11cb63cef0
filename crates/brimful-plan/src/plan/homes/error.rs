//! Why no way of running the stages fits.

use thiserror::Error;

use crate::bytes::Bytes;
use crate::schedule::{CostError, DeviceId, ScheduleError, StageId};

/// Stages for which there is no room, or a question that cannot be answered.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum HomeError {
    /// Even one slot, everything recomputed and all boundaries on the host is too much.
    #[error(
        "device {device} needs {} and has {}, with {} everything recomputed and boundaries on the host: \
         stage {stage} is its largest; cut it finer, or use smaller micro-batches",
        Bytes(*.needed), Bytes(*.memory),
        if *.fetched { "one slot for weights at home," } else { "the weights on the device," }
    )]
    DeviceTooSmall {
        /// Which device.
        device: DeviceId,
        /// Its stage that takes most.
        stage: StageId,
        /// The bytes at its peak.
        needed: u64,
        /// The bytes that it has.
        memory: u64,
        /// Whether weights could live on the host.
        fetched: bool,
    },
    /// What does not fit on the devices does not fit on the host.
    #[error(
        "the host needs {} for the stages that do not fit on their devices, and has {}: use a larger host, \
         more devices, or an optimizer with less state",
        Bytes(*.needed), Bytes(*.memory)
    )]
    HostTooSmall {
        /// The bytes that would live there.
        needed: u64,
        /// The bytes that it has.
        memory: u64,
    },
    /// A schedule that cannot be made.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// Costs that cannot be simulated, or moves that cannot be made.
    #[error(transparent)]
    Cost(#[from] CostError),
}
