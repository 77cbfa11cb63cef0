//! Questions that the planner cannot answer, and reasons for what it leaves out.

use serde::Serialize;
use thiserror::Error;

use crate::balance::BalanceError;
use crate::bytes::Bytes;
use crate::schedule::{CostError, DeviceId, ScheduleError};

use super::PlanChoice;

/// A question that the planner cannot answer.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A list without an entry.
    #[error("no {what} to choose from: give at least one")]
    Nothing {
        /// Of what there is none.
        what: &'static str,
    },
    /// Bytes, or a time, that nothing takes.
    #[error("{what} {value}{}{unit} for each parameter byte: it must be finite and not negative", if unit.is_empty() { "" } else { " " })]
    BadNumber {
        /// What is said to take it.
        what: &'static str,
        /// As given.
        value: f64,
        /// What it is in, if in anything.
        unit: &'static str,
    },
    /// Nothing of what was asked for can be built.
    #[error("none of the {count} combinations can be built; the first: {first}")]
    NothingBuilt {
        /// How many there were.
        count: usize,
        /// Why the first one cannot.
        first: Box<Refusal>,
    },
    /// A profile or a device with impossible numbers.
    #[error(transparent)]
    Balance(#[from] BalanceError),
    /// A schedule that cannot be made.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// Costs that cannot be simulated.
    #[error(transparent)]
    Cost(#[from] CostError),
}

/// A device that would need more memory than it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error, Serialize)]
#[error("device {device} needs {} of {}", Bytes(*.needed), Bytes(*.memory))]
pub struct Misfit {
    /// Which device.
    pub device: DeviceId,
    /// The bytes at its peak.
    pub needed: u64,
    /// The bytes that it has.
    pub memory: u64,
}

impl Misfit {
    /// The bytes that it lacks.
    #[must_use]
    pub fn excess(&self) -> u64 {
        self.needed - self.memory
    }
}

/// A combination that cannot be built at all.
#[derive(Debug, Clone, PartialEq, Error)]
#[error("{choice}: {reason}")]
pub struct Refusal {
    /// What was to be built.
    pub choice: PlanChoice,
    /// Why not.
    pub reason: Reason,
}

/// Why a combination cannot be built.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum Reason {
    /// A stage would stay empty.
    #[error(transparent)]
    TooFewLayers(BalanceError),
    /// A micro-batch would stay empty.
    #[error("{samples} samples cannot be cut into {micro_batches} micro-batches")]
    TooFewSamples {
        /// Samples of the mini-batch.
        samples: usize,
        /// Micro-batches asked for.
        micro_batches: usize,
    },
}
