//! Reasons why an action was not done, and why a worker did not finish its list.

use std::time::Instant;

use brimful_plan::schedule::Action;

use crate::Error;
use crate::oom::{Caught, panic_message};
use crate::pipeline::error::PipelineError;
use crate::pipeline::site::Site;

/// Reason why a worker did not finish its list.
#[derive(Debug)]
pub(crate) enum WorkerFailure {
    /// Another worker or rank failed first.
    Stopped,
    /// This worker failed.
    Failed { at: Instant, error: Error },
}

impl From<Error> for WorkerFailure {
    fn from(error: Error) -> Self {
        Self::Failed { at: Instant::now(), error }
    }
}

/// Reason why an action was not done.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Stop {
    #[error("a neighbour is gone")]
    NeighbourGone,
    #[error(transparent)]
    Error(#[from] Error),
}

/// Returns the failure of an action, with the layer that was running.
pub(super) fn failure(site: &Site, action: Action, caught: Caught<Stop>) -> WorkerFailure {
    let cause = match caught {
        Caught::Error(Stop::NeighbourGone) => return WorkerFailure::Stopped,
        Caught::OutOfMemory(oom) => oom.into(),
        // A failure of the world, not of this stage.
        Caught::Error(Stop::Error(error @ Error::World(_))) => return error.into(),
        Caught::Error(Stop::Error(error)) if error.non_finite().is_some() => return error.into(),
        Caught::Error(Stop::Error(error)) => error,
        Caught::Panic(payload) => PipelineError::of_panic(panic_message(&*payload)).into(),
    };
    let layer = site.layer.get().map(|position| site.layer_name(position));
    Error::Stage { action, layer, cause: Box::new(cause) }.into()
}
