//! What can be wrong with a schedule, or with the costs that it is simulated with.

use std::fmt;

use thiserror::Error;

use super::{Action, ActionKind, DeviceId, MicroBatchId, MoveError, StageId};

/// A schedule that cannot be made, read or run.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// No stage, no micro-batch, or no stage per device.
    #[error("the number of {what} is 0: a schedule needs at least 1")]
    Zero {
        /// Of what there is none.
        what: &'static str,
    },
    /// More actions than any step has; most likely a mistyped number.
    #[error(
        "{stages} stages × {micro_batches} micro-batches is too large a schedule: \
         at most {limit} pairs of stage and micro-batch; use fewer micro-batches"
    )]
    TooLarge {
        /// Stages asked for.
        stages: u128,
        /// Micro-batches asked for.
        micro_batches: u128,
        /// The most pairs of a stage and a micro-batch.
        limit: u128,
    },
    /// A name that no schedule has.
    #[error(
        "no schedule is called '{name}': choose gpipe, 1f1b, interleaved, breadth-first, \
         zero-bubble-h1, interleaved-zero-bubble, zero-bubble-v or auto (interleaved-4 for 4 stages on each device)"
    )]
    UnknownName {
        /// The name as given.
        name: String,
    },
    /// A recompute mode that does not exist.
    #[error("no recompute mode is called '{name}': choose never, except-last or always")]
    UnknownRecompute {
        /// The name as given.
        name: String,
    },
    /// A text that is not an action.
    #[error("'{text}' is not an action: write stage, one of F B I W R, micro-batch, as in 2F0")]
    NotAnAction {
        /// The start of the text.
        text: String,
    },
    /// A cell of a CSV file that is not an action.
    #[error("line {line}, cell {cell}: {source}")]
    Csv {
        /// Counted from 1, as editors do.
        line: usize,
        /// Counted from 1.
        cell: usize,
        /// What is wrong with the cell.
        source: Box<ScheduleError>,
    },
    /// Lists of actions that cannot be run.
    #[error("{rule}\n{grid}")]
    Invalid {
        /// The rule that is broken.
        rule: Rule,
        /// The lists around the broken place, with the offending cells marked.
        grid: String,
    },
}

/// A rule of every schedule, as it was broken.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Rule {
    /// There must be something to do.
    #[error("the schedule holds no action: give each device at least one forward and its backward")]
    Empty,
    /// A device without work.
    #[error("device {0} has no action: leave it out, or give it a stage")]
    IdleDevice(DeviceId),
    /// A stage lives on one device.
    #[error("stage {stage} is on device {first} and on device {second}: keep it on one")]
    TwoDevices {
        /// The stage.
        stage: StageId,
        /// The device of its first action.
        first: DeviceId,
        /// The device of the offending action.
        second: DeviceId,
    },
    /// Each action happens once.
    #[error("{0} is there twice: remove one")]
    Doubled(Action),
    /// Each stage runs each micro-batch forward and backward.
    #[error("{0} is missing: every stage needs a forward and a backward of every micro-batch")]
    Missing(Action),
    /// An action that comes before what it needs from its own stage.
    #[error("{action} comes before its {}: move it after", needs.name())]
    TooEarly {
        /// The offending action.
        action: Action,
        /// What must come first.
        needs: ActionKind,
    },
    /// A recompute after the backward that needed it.
    #[error("{0} comes after its backward has begun: move it before, or remove it")]
    RecomputeTooLate(Action),
    /// A whole backward, or two halves.
    #[error("{0} repeats a part of a backward that is already there: use B alone, or I and W")]
    MixedBackward(Action),
    /// Neighbours must agree on the order of the micro-batches.
    #[error(
        "{action} is next, but the neighbour hands over micro-batch {arrives} first: \
         run the micro-batches in one order on both stages"
    )]
    OutOfOrder {
        /// The offending action.
        action: Action,
        /// The micro-batch that the channel delivers.
        arrives: MicroBatchId,
    },
    /// Devices that wait for each other.
    #[error("deadlock: {}", list(.0))]
    Deadlock(Vec<BlockedDevice>),
}

/// A device that waits without end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockedDevice {
    /// Who waits.
    pub device: DeviceId,
    /// With what.
    pub action: Action,
    /// For whom.
    pub stage: StageId,
}

impl fmt::Display for BlockedDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, action, stage } = self;
        write!(f, "device {device} waits in {action} for stage {stage}")
    }
}

/// The first few waits; a deadlock of a thousand devices is no better told in full.
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
    #[error("costs of {given} stages were given, but the schedule has {needed}: give one for each")]
    WrongStages {
        /// How many were given.
        given: usize,
        /// How many the schedule has.
        needed: usize,
    },
    /// A time that no action can take.
    #[error("the {what} time of stage {stage} is {value}: it must be finite and not negative")]
    BadTime {
        /// Of which stage.
        stage: StageId,
        /// Of which action.
        what: &'static str,
        /// The time as given.
        value: f64,
    },
    /// A link that carries nothing.
    #[error("the {what} of the link is {value}: {must}")]
    BadLink {
        /// Latency or bandwidth.
        what: &'static str,
        /// The value as given.
        value: f64,
        /// What it must be.
        must: &'static str,
    },
    /// A bus that carries nothing.
    #[error(
        "the {what} bandwidth of the bus is {value}: it must be above 0 (infinite for moves that take \
         no time)"
    )]
    BadBus {
        /// Which way.
        what: &'static str,
        /// The bandwidth as given.
        value: f64,
    },
    /// Moves of another schedule.
    #[error(transparent)]
    Moves(#[from] MoveError),
    /// Times whose sum is no number.
    #[error("the times add up to more than a number can hold: give them in a larger unit")]
    Overflow,
}
