//! Describes one worker's work in a step.

use std::sync::Arc;
use std::time::Instant;

use tch::Tensor;

use super::wiring::Ports;
use crate::Result;
use crate::loss::{Loss, MicroBatchWeight};
use crate::ranks::RankSum;
use brimful_plan::schedule::Actions;

/// Function from a micro-batch's number and outputs to its loss, if it has one.
pub(crate) type LossFn = Box<dyn FnMut(usize, &[Tensor]) -> Result<Option<Loss>> + Send>;

/// Work of one worker in a step.
pub(crate) struct Job {
    pub(crate) actions: Arc<Actions>,
    /// Channel ends of the worker's stages, in order.
    pub(crate) ports: Vec<Ports>,
    /// The micro-batches that enter the first stage; empty for other workers.
    pub(crate) inputs: Vec<Vec<Tensor>>,
    pub(crate) end: End,
    /// Collective that sums gradients over the pipelines while the last backward still runs.
    pub(crate) summing: Option<RankSum>,
    /// The number of the first micro-batch in the step.
    pub(crate) first: usize,
    pub(crate) mode: Mode,
    pub(crate) seed: u64,
    pub(crate) weights: Arc<[MicroBatchWeight]>,
    /// Whether images and convolutions are in channels-last memory format.
    pub(crate) channels_last: bool,
    pub(crate) start: Instant,
    /// Whether to time the transfers of weights, gradients and boundaries.
    pub(crate) traces_transfers: bool,
}

/// Purpose of a mini-batch's run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Runs only the forward.
    Evaluate,
    /// Runs forward and backward; `last` marks the last mini-batch of its step.
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

/// Destination of the model's outputs.
pub(crate) enum End {
    /// Another worker has the last stage.
    Elsewhere,
    /// A closure gets the outputs; in training, backward starts from its loss.
    Closure(LossFn),
    /// The worker gathers the outputs.
    Gather,
}
