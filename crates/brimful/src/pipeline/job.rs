//! What one worker is told to do in a step.

use std::sync::Arc;
use std::time::Instant;

use tch::Tensor;

use super::wiring::Ports;
use crate::Result;
use crate::loss::{Loss, Part};
use crate::ranks::RanksTurn;
use crate::schedule::Actions;

/// The loss of a micro-batch, from its number and the model's outputs.
pub(super) type Head = Box<dyn FnMut(usize, &[Tensor]) -> Result<Loss> + Send>;

/// What one worker is to do in a step.
pub(super) struct Job {
    pub(super) actions: Arc<Actions>,
    /// Of the worker's stages, in order.
    pub(super) ports: Vec<Ports>,
    /// The micro-batches that enter the first stage; empty for other workers.
    pub(super) inputs: Vec<Vec<Tensor>>,
    pub(super) end: End,
    /// Where the gradients are added to those of other pipelines, if there are such.
    pub(super) summing: Option<RanksTurn>,
    /// The number of the first micro-batch in the step.
    pub(super) first: usize,
    pub(super) train: bool,
    pub(super) seed: u64,
    pub(super) parts: Arc<[Part]>,
    pub(super) start: Instant,
}

/// What becomes of the model's outputs.
pub(super) enum End {
    /// The worker does not have the last stage.
    Elsewhere,
    /// A loss is computed and, in training, traced back.
    Loss(Head),
    /// They are gathered.
    Gather,
}
