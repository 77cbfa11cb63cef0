//! Errors of planning, and reasons why a plan leaves out a combination.

use serde::Serialize;
use thiserror::Error;

use crate::balance::BalanceError;
use crate::bytes::Bytes;
use crate::schedule::{CostError, DeviceId, ScheduleError};

use super::PlanChoice;

/// Error of planning.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum PlanError {
    /// Empty list of choices.
    #[error("no {what} to choose from: give at least one")]
    Nothing {
        /// Name of the list.
        what: &'static str,
    },
    /// Invalid number of bytes, or invalid time.
    #[error("the {what} per parameter byte is {value}: it must be finite and not negative")]
    BadNumber {
        /// Name of the number.
        what: &'static str,
        /// Number as given.
        value: f64,
    },
    /// No combination can be built.
    #[error("none of the {count} combinations can be built; the first fails with: {first}")]
    NothingBuilt {
        /// Number of combinations.
        count: usize,
        /// Reason for the first one.
        first: Box<Refusal>,
    },
    /// Profile or device with invalid numbers.
    #[error(transparent)]
    Balance(#[from] BalanceError),
    /// Schedule that cannot be made.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// Costs that cannot be simulated.
    #[error(transparent)]
    Cost(#[from] CostError),
}

/// Device that would need more memory than it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error, Serialize)]
#[error("device {device} needs {}, but has {}", Bytes(*.needed), Bytes(*.memory))]
pub struct Misfit {
    /// Number of the device.
    pub device: DeviceId,
    /// Peak bytes.
    pub needed: u64,
    /// Bytes that it has.
    pub memory: u64,
}

impl Misfit {
    /// Returns the bytes that the device lacks.
    #[must_use]
    pub fn excess(&self) -> u64 {
        self.needed - self.memory
    }
}

/// Combination that cannot be built.
#[derive(Debug, Clone, PartialEq, Error)]
#[error("{choice}: {reason}")]
pub struct Refusal {
    /// Choice that cannot be built.
    pub choice: PlanChoice,
    /// Reason.
    pub reason: Reason,
}

/// Reason why a combination cannot be built.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum Reason {
    /// More stages than layers.
    #[error(transparent)]
    TooFewLayers(BalanceError),
    /// More micro-batches than samples.
    #[error("{samples} samples cannot be cut into {micro_batches} micro-batches")]
    TooFewSamples {
        /// Number of samples in the mini-batch.
        samples: usize,
        /// Number of micro-batches asked for.
        micro_batches: usize,
    },
}
