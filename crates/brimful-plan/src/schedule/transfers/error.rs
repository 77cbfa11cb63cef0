//! Errors of transfers.

use thiserror::Error;

use super::super::{Action, DeviceId, StageId};
use super::Transfer;

/// Transfers that cannot be made or run.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TransferError {
    /// Locations for another number of stages.
    #[error(
        "locations of {given} stages were given, but the schedule has {needed} stages: give one per stage"
    )]
    WrongStages {
        /// Number of locations given.
        given: usize,
        /// Number of stages of the schedule.
        needed: usize,
    },
    /// Transfers for another number of devices.
    #[error(
        "transfers of {given} devices were given, but the schedule has {needed}: give a list for each"
    )]
    WrongDevices {
        /// Number of lists given.
        given: usize,
        /// Number of devices of the schedule.
        needed: usize,
    },
    /// No device buffer to fetch weights into.
    #[error(
        "stage {stage} is offloaded, but its device has no buffer to fetch it into: set at least one"
    )]
    NoDeviceBuffer {
        /// First stage that is offloaded.
        stage: StageId,
    },
    /// Transfers that break a rule.
    #[error("device {device}: {rule}")]
    Broken {
        /// Device of the transfers.
        device: DeviceId,
        /// Broken rule.
        rule: TransferRule,
    },
}

/// Broken rule of transfers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TransferRule {
    /// Transfers are listed in the order in which they start, and start within the list.
    #[error(
        "{0} is out of order: start transfers in their order, the last ones after the last action"
    )]
    OutOfOrder(Transfer),
    /// Only offloaded stages and boundaries of this device are transferred.
    #[error("{0} belongs to a stage or boundary that is not offloaded: remove it")]
    NotAtHost(Transfer),
    /// Weights are fetched before they are used.
    #[error("{0} runs while the weights of its stage are on the host: fetch the stage first")]
    NotFetched(Action),
    /// A stage is in at most one device buffer.
    #[error("{0} fetches a stage that is already on the device: remove it")]
    FetchedTwice(Transfer),
    /// A stage is fetched only into a free device buffer.
    #[error(
        "{fetch} needs a device buffer, but all {device_buffers} are taken: release a stage before"
    )]
    DeviceBuffersFull {
        /// Fetch without a buffer.
        fetch: Transfer,
        /// Number of buffers.
        device_buffers: usize,
    },
    /// Only a fetched stage can be released.
    #[error("{0} releases a stage that is not on the device: remove this release")]
    NothingToRelease(Transfer),
    /// Every fetched stage is released.
    #[error("stage {0} is fetched and never released: release it after its last action")]
    NeverReleased(StageId),
    /// Gradients are complete before they are sent to the host.
    #[error("{gradients} comes before {action}: move {gradients} after the stage's last backward")]
    GradientsTooEarly {
        /// Gradients that were sent.
        gradients: Transfer,
        /// Backward that would add to them.
        action: Action,
    },
    /// Gradients are sent once, and only for trained stages that are offloaded.
    #[error(
        "{0} has no gradients to send: the stage has not run a backward, or they were already sent"
    )]
    NoGradients(Transfer),
    /// An update needs all of its stage's gradients.
    #[error("the gradients of stage {0} never go to the host: send them after its last backward")]
    GradientsKept(StageId),
    /// A boundary or its gradient is sent once, after it is made.
    #[error(
        "{0} has nothing to transfer: the tensor does not exist yet, is on the other side, or was already \
         consumed"
    )]
    NothingToTransfer(Transfer),
    /// A boundary and its gradient are back when they are needed.
    #[error(
        "{0} runs while a tensor that it needs is on the host: copy the tensor to the device first"
    )]
    BoundaryAway(Action),
    /// Data that are offloaded must be sent to the host.
    #[error("the output of {0} is offloaded but never sent to the host: add a transfer after {0}")]
    BoundaryKept(Action),
}
