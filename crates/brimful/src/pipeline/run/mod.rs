//! Runs one worker's part of a step: its list of actions, in order.
//!
//! ```text
//!   F   receive the input · run the layers · send the output          keeps the input and the output's graph
//!   R   run the layers again (activation recomputation)               keeps the output's graph
//!   B   receive the output's gradient · run backward · send the input's      keeps nothing
//!   I   receive the output's gradient · compute dX · send it                 keeps what dW needs
//!   W   compute dW                                                           keeps nothing
//! ```
//!
//! A forward with recomputation keeps only its input, unless the device has free bytes for its activations:
//! then R does nothing. On the last stage no other stage waits for such a forward, so the stage skips it
//! and runs only R.

mod backward;
mod barrier;
mod exchange;
mod failure;
mod intake;
mod timeline;
mod wiring;
mod worker_run;

use std::sync::Arc;
use std::time::Instant;

use tch::Tensor;

pub(crate) use failure::WorkerFailure;
pub(crate) use wiring::wire;
pub(crate) use worker_run::WorkerRun;

use crate::Result;
use crate::loss::{Loss, MicroBatchWeight};
use crate::ranks::RankSum;
use brimful_plan::schedule::Actions;
use wiring::Ports;

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
