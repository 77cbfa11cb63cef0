//! Errors of schedules, and of the costs for their simulation.

use std::fmt;

use thiserror::Error;

use super::{Action, ActionKind, DeviceId, MicroBatchId, StageId, TransferError};

/// Schedule that cannot be made, parsed or run.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// No stage, no micro-batch, or no stage per device.
    #[error("the number of {what} is 0: a schedule needs at least 1")]
    Zero {
        /// Name of the number.
        what: &'static str,
    },
    /// More actions than any real step; most likely a mistyped number.
    #[error(
        "{stages} stages × {micro_batches} micro-batches is too large a schedule: \
         at most {limit} pairs of stage and micro-batch; use fewer micro-batches"
    )]
    TooLarge {
        /// Number of stages asked for.
        stages: u128,
        /// Number of micro-batches asked for.
        micro_batches: u128,
        /// Largest number of pairs of a stage and a micro-batch.
        limit: u128,
    },
    /// Unknown name of a schedule.
    #[error(
        "no schedule is called '{name}': choose gpipe, 1f1b, interleaved, breadth-first, \
         zero-bubble-h1, interleaved-zero-bubble, zero-bubble-v or auto (interleaved-4 for 4 stages on each device)"
    )]
    UnknownName {
        /// Name as given.
        name: String,
    },
    /// Unknown recompute mode.
    #[error("no recompute mode is called '{name}': choose never, except-last or always")]
    UnknownRecompute {
        /// Name as given.
        name: String,
    },
    /// Text that is not an action.
    #[error("'{text}' is not an action: write stage, one of F B I W R, micro-batch, as in 2F0")]
    NotAnAction {
        /// Start of the text.
        text: String,
    },
    /// Cell of a CSV file that is not an action.
    #[error("line {line}, cell {cell}: {source}")]
    Csv {
        /// Line, counted from 1 as in editors.
        line: usize,
        /// Cell, counted from 1.
        cell: usize,
        /// Error of the cell.
        source: Box<ScheduleError>,
    },
    /// Lists of actions that cannot be run.
    #[error("{rule}\n{grid}")]
    Invalid {
        /// Broken rule.
        rule: Rule,
        /// Lists around the broken place, with the offending cells marked.
        grid: String,
    },
}

/// Broken rule of a schedule.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Rule {
    /// The schedule must have actions.
    #[error("the schedule holds no action: give each device at least one forward and its backward")]
    Empty,
    /// Every device must have an action.
    #[error("device {0} has no action: leave it out, or give it a stage")]
    IdleDevice(DeviceId),
    /// A stage is on one device.
    #[error("stage {stage} is on device {first} and on device {second}: keep it on one")]
    TwoDevices {
        /// Stage on two devices.
        stage: StageId,
        /// Device of its first action.
        first: DeviceId,
        /// Device of the offending action.
        second: DeviceId,
    },
    /// Each action happens once.
    #[error("{0} is there twice: remove one")]
    Doubled(Action),
    /// Each stage runs each micro-batch forward and backward.
    #[error("{0} is missing: every stage needs a forward and a backward of every micro-batch")]
    Missing(Action),
    /// An action comes after the actions of its stage that it needs.
    #[error("{action} comes before its {}: move it after", needs.name())]
    TooEarly {
        /// Offending action.
        action: Action,
        /// Kind that must come first.
        needs: ActionKind,
    },
    /// A recompute comes before the backward that needs it.
    #[error("{0} comes after its backward has begun: move it before, or remove it")]
    RecomputeTooLate(Action),
    /// A backward is either whole or split.
    #[error(
        "{0} computes a gradient that an earlier action computes already: use B (whole backward) alone, or I (input gradient) and W (weight gradient)"
    )]
    MixedBackward(Action),
    /// Neighbouring stages run the micro-batches in the same order.
    #[error(
        "{action} is next, but the neighbour hands over micro-batch {arrives} first: \
         run the micro-batches in one order on both stages"
    )]
    OutOfOrder {
        /// Offending action.
        action: Action,
        /// Micro-batch that the channel delivers.
        arrives: MicroBatchId,
    },
    /// Devices must not wait for each other.
    #[error("deadlock: {}", list(.0))]
    Deadlock(Vec<BlockedDevice>),
}

/// Device that waits for ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockedDevice {
    /// Device.
    pub device: DeviceId,
    /// Action that it cannot run.
    pub action: Action,
    /// Stage that it waits for.
    pub stage: StageId,
}

impl fmt::Display for BlockedDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, action, stage } = self;
        write!(f, "device {device} waits in {action} for stage {stage}")
    }
}

/// Lists the first few waits; a longer list would not help.
fn list(waits: &[BlockedDevice]) -> String {
    const SHOWN: usize = 4;
    let mut text: Vec<_> = waits.iter().take(SHOWN).map(BlockedDevice::to_string).collect();
    if waits.len() > SHOWN {
        text.push(format!("and {} more", waits.len() - SHOWN));
    }
    text.join(", ")
}

/// Costs that cannot be simulated.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum CostError {
    /// Costs for another number of stages.
    #[error(
        "costs of {given} stages were given, but the schedule has {needed} stages: give the costs of each \
         stage"
    )]
    WrongStages {
        /// Number of stages with costs.
        given: usize,
        /// Number of stages of the schedule.
        needed: usize,
    },
    /// Invalid time.
    #[error("the {what} time of stage {stage} is {value}: it must be finite and not negative")]
    BadTime {
        /// Stage.
        stage: StageId,
        /// Name of the action.
        what: &'static str,
        /// Time as given.
        value: f64,
    },
    /// Link with an invalid latency or bandwidth.
    #[error("the {what} of the link is {value}: {must}")]
    BadLink {
        /// `latency` or `bandwidth`.
        what: &'static str,
        /// Value as given.
        value: f64,
        /// Requirement for the value.
        must: &'static str,
    },
    /// Host link with an invalid bandwidth.
    #[error(
        "the {what} bandwidth of the host link is {value}: it must be above 0 (infinite for transfers that take \
         no time)"
    )]
    BadHostLink {
        /// Direction.
        what: &'static str,
        /// Bandwidth as given.
        value: f64,
    },
    /// Transfers that do not belong to the schedule.
    #[error(transparent)]
    Transfers(#[from] TransferError),
    /// Times whose sum is infinite.
    #[error("the times add up to more than a number can hold: give them in a larger unit")]
    Overflow,
}
