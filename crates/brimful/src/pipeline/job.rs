//! What one worker is told to do in a step.

use std::sync::Arc;
use std::time::Instant;

use tch::Tensor;

use super::wiring::Ports;
use crate::Result;
use crate::loss::{Loss, MicroBatchWeight};
use crate::ranks::RanksTurn;
use crate::schedule::Actions;

/// What becomes of a micro-batch's outputs, from its number: a loss, or none.
pub(super) type LossFn = Box<dyn FnMut(usize, &[Tensor]) -> Result<Option<Loss>> + Send>;

/// What one worker is to do in a step.
pub(super) struct Job {
    pub(super) actions: Arc<Actions>,
    /// Of the worker's stages, in order.
    pub(super) ports: Vec<Ports>,
    /// The micro-batches that enter the first stage; empty for other workers.
    pub(super) inputs: Vec<Vec<Tensor>>,
    pub(super) end: End,
    /// Where the gradients are added to those of other pipelines while the last backward still runs.
    pub(super) summing: Option<RanksTurn>,
    /// The number of the first micro-batch in the step.
    pub(super) first: usize,
    pub(super) mode: Mode,
    pub(super) seed: u64,
    pub(super) weights: Arc<[MicroBatchWeight]>,
    pub(super) start: Instant,
}

/// What a mini-batch is run for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// Forward alone.
    Evaluate,
    /// Forward and backward, as the last mini-batch of its step or not.
    Train { last: bool },
}

impl Mode {
    pub(super) fn trains(self) -> bool {
        matches!(self, Self::Train { .. })
    }

    pub(super) fn is_last(self) -> bool {
        !matches!(self, Self::Train { last: false })
    }
}

/// What becomes of the model's outputs.
pub(super) enum End {
    /// The worker does not have the last stage.
    Elsewhere,
    /// A closure gets them; a loss of its is, in training, traced back.
    Closure(LossFn),
    /// They are gathered.
    Gather,
}
