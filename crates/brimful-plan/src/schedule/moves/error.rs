//! Why moves cannot be made or run.

use thiserror::Error;

use super::super::{Action, DeviceId, StageId};
use super::Move;

/// Moves that cannot be made or run.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum MoveError {
    /// Homes for another number of stages.
    #[error("homes of {given} stages were given, but the schedule has {needed}: give one for each")]
    WrongStages {
        /// How many were given.
        given: usize,
        /// How many the schedule has.
        needed: usize,
    },
    /// Moves for another number of devices.
    #[error(
        "moves of {given} devices were given, but the schedule has {needed}: give a list for each"
    )]
    WrongDevices {
        /// How many were given.
        given: usize,
        /// How many the schedule has.
        needed: usize,
    },
    /// Nowhere to put weights that are fetched.
    #[error(
        "stage {stage} lives on the host, but the devices have no slot to fetch it into: give at least one"
    )]
    NoSlot {
        /// The first stage that lives on the host.
        stage: StageId,
    },
    /// Moves that break a rule.
    #[error("device {device}: {rule}")]
    Broken {
        /// Whose moves.
        device: DeviceId,
        /// Which rule.
        rule: MoveRule,
    },
}

/// A rule of all moves, as it was broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum MoveRule {
    /// Moves are in the order in which they are started, and started within the list.
    #[error("{0} is out of order: start moves in their order, the last ones after the last action")]
    OutOfOrder(Move),
    /// A stage that lives on the device does not move, nor does one of another device.
    #[error("{0} moves what does not live on the host: leave it out")]
    NotAtHost(Move),
    /// Weights are there before they are used.
    #[error("{0} comes while its weights are on the host: fetch them before")]
    NotFetched(Action),
    /// A stage is in one slot.
    #[error("{0} fetches what is there already: leave it out")]
    FetchedTwice(Move),
    /// There are as many slots as there are.
    #[error("{fetch} needs a slot, but all {slots} are taken: release a stage before")]
    SlotsFull {
        /// The fetch without a slot.
        fetch: Move,
        /// How many slots there are.
        slots: usize,
    },
    /// Only what is there can be released.
    #[error("{0} releases what is not there: leave it out")]
    NothingToRelease(Move),
    /// What was fetched is released.
    #[error("stage {0} is fetched and never released: release it after its last action")]
    NeverReleased(StageId),
    /// Gradients are whole before they leave.
    #[error("{gradients} comes before {action}: move it after the last backward")]
    GradientsTooEarly {
        /// The gradients that left.
        gradients: Move,
        /// The backward that would add to them.
        action: Action,
    },
    /// Gradients leave once, and only where a trained stage lives on the host.
    #[error("{0} has nothing to send: the stage has run no backward, or they are gone already")]
    NoGradients(Move),
    /// The optimizer at home needs them.
    #[error("the gradients of stage {0} never go home: send them after its last backward")]
    GradientsKept(StageId),
    /// A boundary or its gradient leaves when it is made, and once.
    #[error("{0} has nothing to move: it is not made yet, is not where it starts, or is used up")]
    NothingToMove(Move),
    /// A boundary and its gradient are back when they are needed.
    #[error("{0} comes while what it needs is on the host: bring it back before")]
    BoundaryAway(Action),
    /// What others wait for on the host has to get there.
    #[error("what {0} makes never leaves for the host, where it is to wait: send it after it")]
    BoundaryKept(Action),
}
