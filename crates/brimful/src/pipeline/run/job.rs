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
pub(crate) type LossFn = Box<dyn FnMut(usize, &[Tensor]) -> Result<Option<Loss>> + Send>;

/// What one worker is to do in a step.
pub(crate) struct Job {
    pub(crate) actions: Arc<Actions>,
    /// Of the worker's stages, in order.
    pub(crate) ports: Vec<Ports>,
    /// The micro-batches that enter the first stage; empty for other workers.
    pub(crate) inputs: Vec<Vec<Tensor>>,
    pub(crate) end: End,
    /// Where the gradients are added to those of other pipelines while the last backward still runs.
    pub(crate) summing: Option<RanksTurn>,
    /// The number of the first micro-batch in the step.
    pub(crate) first: usize,
    pub(crate) mode: Mode,
    pub(crate) seed: u64,
    pub(crate) weights: Arc<[MicroBatchWeight]>,
    /// Whether images and convolutions have their channels last in memory.
    pub(crate) channels_last: bool,
    pub(crate) start: Instant,
    /// Whether somebody wants to know when weights, gradients and boundaries moved.
    pub(crate) times_moves: bool,
}

/// What a mini-batch is run for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Forward alone.
    Evaluate,
    /// Forward and backward, as the last mini-batch of its step or not.
    Train { last: bool },
}

impl Mode {
    pub(crate) fn trains(self) -> bool {
        matches!(self, Self::Train { .. })
    }

    pub(crate) fn is_last(self) -> bool {
        !matches!(self, Self::Train { last: false })
    }
}

/// What becomes of the model's outputs.
pub(crate) enum End {
    /// The worker does not have the last stage.
    Elsewhere,
    /// A closure gets them; a loss of its is, in training, traced back.
    Closure(LossFn),
    /// They are gathered.
    Gather,
}
