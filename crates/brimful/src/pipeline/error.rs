//! Why a pipeline cannot be built, and where one of its stages failed.

use std::fmt;

use thiserror::Error;

use crate::Error;
use crate::bytes::Bytes;
use crate::loss::{LossError, NonFiniteValue};
use crate::oom::OutOfMemory;
use crate::schedule::{Action, ActionKind, StageId};
use crate::step::StepError;
use crate::world::{RankCause, WorldError};

/// A pipeline that cannot be built or used as asked.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PipelineError {
    /// A model of nothing.
    #[error("the model has no layer: add at least one")]
    NoLayers,
    /// More stages than devices can take.
    #[error(
        "{stages} stages, {per_device} on a device, need {} devices, but there are {devices}: name a \
         device more than once to put several workers on it, or use fewer stages",
        stages.div_ceil(*per_device)
    )]
    TooFewDevices {
        /// Stages in the balance.
        stages: usize,
        /// Stages that the schedule puts on a device.
        per_device: usize,
        /// Devices given.
        devices: usize,
    },
    /// A balance that leaves a device with fewer stages than the others.
    #[error(
        "the schedule puts {per_device} stages on each device, which {stages} stages do not fill: \
         give a balance of a multiple of {per_device} stages"
    )]
    UnevenStages {
        /// Stages in the balance.
        stages: usize,
        /// Stages that the schedule puts on a device.
        per_device: usize,
    },
    /// Actions for other devices than the pipeline's.
    #[error(
        "the actions put the stages on devices {given:?}, but the pipeline has them on {here:?}: give \
         a list for that placement, or build the pipeline with another balance or schedule"
    )]
    OtherPlacement {
        /// The device of each stage of the pipeline, counted from 0.
        here: Vec<usize>,
        /// The device of each stage in the list.
        given: Vec<usize>,
    },
    /// A backward of a stage that lives on the host through a graph that was made before its weights left.
    #[error(
        "{action} goes back through a graph that looks at stage {}'s weights on device {device}, but that has room for \
         {slots} stages that live on the host at a time, and others lie there since: run {} right before it, choose \
         breadth-first, or let at most {slots} stages of a device live on the host",
        action.stage,
        remade(*action)
    )]
    GraphOutlivesWeights {
        /// The backward.
        action: Action,
        /// The device, counted from 0.
        device: usize,
        /// How many stages can be there at a time.
        slots: usize,
    },
    /// The same, as it is about to happen.
    #[error(
        "its graph looks at weights that have left the device since, and others lie there: compute it again (R) right \
         before its backward"
    )]
    WeightsLeft,
    /// A model that gives another number of tensors than the call is made for.
    #[error(
        "the model gives {given} tensors, and the closure takes {taken}: let it take a `Vec<Tensor>`, \
         or a tuple of {given}"
    )]
    OutputCount {
        /// How many the model gives.
        given: usize,
        /// How many the closure takes.
        taken: usize,
    },
    /// Devices that cannot be dealt out to several pipelines.
    #[error(
        "{devices} devices cannot be dealt out to {replicas} replicas of a pipeline: give each as many"
    )]
    UnevenReplicas {
        /// How many devices there are.
        devices: usize,
        /// How many pipelines.
        replicas: usize,
    },
    /// An input that has a graph, or is to get a gradient.
    #[error(
        "input {leaf} requires a gradient, which a pipeline does not give back: make what computes it \
         a layer, or detach it"
    )]
    InputGradient {
        /// Which of the mini-batch's tensors, counted from 0.
        leaf: usize,
    },
    /// A forward that could not be tried again with its backward.
    #[error(
        "an automatic size must try forward, loss and backward together: use `backward_whole`, or give a \
         number of micro-batches"
    )]
    AutomaticForward,
    /// Outputs of a forward that was not the last.
    #[error(
        "these outputs are of an earlier forward, whose graphs are gone: call `backward_from` before the \
         next `forward`, `backward`, `evaluate` or `map`"
    )]
    OldOutputs,
    /// Updates that follow the backward, of a loss that is divided at the end.
    #[error(
        "updates follow the backward, but what this loss is divided by is known only at its end: use \
         `Loss::mean`, or let updates come after it (`follow_backward(false)`)"
    )]
    FollowsUnknown,
    /// Updates that follow the backward, in a step of several mini-batches or of several workers.
    #[error(
        "updates follow the backward, which needs a step of one mini-batch in one pipeline on one device: \
         let them come after it (`follow_backward(false)`)"
    )]
    FollowsParts,
    /// Updates that follow the backward, by actions that end a stage's backward before all of a shared parameter's
    /// gradient is there.
    #[error(
        "updates follow the backward, but by these actions stage {owner} has its last one before stage {user}, which \
         adds to the gradient of a parameter that both have: run stage {user}'s weight halves before that, or let \
         updates come after the backward (`follow_backward(false)`)"
    )]
    FollowsTooEarly {
        /// The stage that the parameter belongs to.
        owner: StageId,
        /// The later one that shares it.
        user: StageId,
    },
    /// A step that failed when some of its updates were made.
    #[error(
        "the updates of {stages} stages had followed the backward, or were about to, when the step failed, so the \
         parameters are of no step: load the model that was saved last. It failed because: {cause}"
    )]
    PartlyUpdated {
        /// How many.
        stages: usize,
        /// What the step failed with.
        cause: String,
    },
    /// Gradients that are to be clipped together, some of which are gone.
    #[error(
        "updates follow the backward, so the gradients of {stages} stages that live on the host are gone, and the norm \
         would be that of the others: to clip, let updates come after it (`follow_backward(false)`)"
    )]
    FollowsClipped {
        /// How many.
        stages: usize,
    },
    /// Homes for another number of stages.
    #[error("homes of {given} stages were given, but the pipeline has {stages}: give one for each")]
    WrongHomes {
        /// How many were given.
        given: usize,
        /// How many stages there are.
        stages: usize,
    },
    /// A host that cannot hold what is to live there.
    #[error(
        "{stages} stages that live on the host need {needed} there (weights, gradients and the optimizer's \
         state), but it has {room}: let fewer live there, choose a smaller number type or an optimizer that \
         keeps less, or use more devices"
    )]
    HostTooSmall {
        /// How many stages live there.
        stages: usize,
        /// What they need.
        needed: Bytes,
        /// What the host has for them.
        room: Bytes,
    },
    /// Outputs that no loss was traced back to.
    #[error("the outputs have no gradient: compute a loss from them and call its `backward` first")]
    NoOutputGradient,
    /// A name that no layer's variable has.
    #[error("no variable's name satisfies the condition; the first of {variables} is '{first}'")]
    NoSuchVariable {
        /// How many there are.
        variables: usize,
        /// One of them.
        first: String,
    },
    /// Saved variables that are not the model's.
    #[error("{}: load what was saved from this model", listed(differences))]
    Mismatch {
        /// For each variable that differs, what it is in the file and in the model.
        differences: Vec<String>,
    },
    /// Exact BatchNorms where micro-batches do not meet.
    #[error(
        "exact BatchNorms are of the samples of one device, but there are {devices} devices, {replicas} \
         replicas and {ranks} ranks: give the pipeline one device, or take `BatchNormPolicy::Deferred`"
    )]
    ExactOnSeveral {
        /// Devices of this process.
        devices: usize,
        /// Pipelines.
        replicas: usize,
        /// Ranks.
        ranks: usize,
    },
    /// An exact BatchNorm without a layer before it.
    #[error(
        "'{layer}' is an exact BatchNorm and the first layer, but all micro-batches must pass a layer \
         before they meet: put one before it, such as `.add_fn(\"input\", |x| x * 1.0)`"
    )]
    ExactFirst {
        /// Its name.
        layer: String,
    },
    /// Actions that let a micro-batch pass an exact BatchNorm before all have come to it.
    #[error(
        "{came} of {micro_batches} micro-batches have come to an exact BatchNorm that one of them is to \
         pass: give a list of actions in which each stage runs all before the next stage runs one"
    )]
    NotAllMet {
        /// Those that have come.
        came: usize,
        /// All.
        micro_batches: usize,
    },
    /// An input that is needed again and is not what it was.
    #[error(
        "a layer changed the stage's input in place, but it is to be computed from again: let the \
         stage's first layer make a tensor of its own, or do not recompute"
    )]
    InputChanged,
    /// A layer that libtorch lets change nothing in place.
    #[error(
        "it changes in place what a gradient is to arrive at, its stage's input or a parameter: let it make a \
         tensor of its own (`relu` for `relu_`), or be one layer with what comes before it"
    )]
    ChangesInPlace,
}

/// What libtorch says of it, be it of the tensor itself or of a view.
const REFUSED_IN_PLACE: &str =
    "leaf Variable that requires grad is being used in an in-place operation";

/// What errors say of a step that was undone, between what happened and what helps.
const NOTHING_CHANGED: &str = "nothing was changed; ";

/// A stage that failed: the step was undone, and the pipeline can be used again.
#[derive(Debug, Clone, PartialEq, Error)]
pub struct StageError {
    /// What the stage was doing, with which micro-batch.
    pub action: Action,
    /// The layer that was running; none in a backward, a transfer or the loss.
    pub layer: Option<String>,
    /// What happened. The message says it, so it is no source that would say it again.
    pub cause: Cause,
}

/// What happened in a stage.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum Cause {
    /// Memory ran out.
    #[error(transparent)]
    OutOfMemory(OutOfMemory),
    /// A layer or the loss panicked, in its own words.
    #[error("it panicked: {0}")]
    Panic(String),
    /// Another error.
    #[error(transparent)]
    Error(Error),
}

impl PipelineError {
    /// A step that failed with this error when so many stages were updated, or about to be.
    pub(crate) fn partly_updated(stages: usize, error: &Error) -> Self {
        // Of all errors that say so, it is true before an update alone.
        let cause = error.to_string().replace(NOTHING_CHANGED, "");
        Self::PartlyUpdated { stages, cause }
    }
}

impl Cause {
    /// A layer's or a loss's panic: libtorch's refusals say neither which stage they are of nor what helps.
    pub(crate) fn of_panic(words: String) -> Self {
        match words.contains(REFUSED_IN_PLACE) {
            true => Self::Error(PipelineError::ChangesInPlace.into()),
            false => Self::Panic(words),
        }
    }
}

impl fmt::Display for StageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { action, layer, cause } = self;
        let (stage, kind, i) = (action.stage, action.kind.name(), action.micro_batch);
        write!(f, "stage {stage} failed in the {kind} of micro-batch {i}")?;
        if let Some(layer) = layer {
            write!(f, ", in layer '{layer}'")?;
        }
        write!(f, ": {cause}")
    }
}

impl Error {
    /// The report of memory that ran out, be it here or in a stage of a pipeline.
    pub fn out_of_memory(&self) -> Option<&OutOfMemory> {
        match self {
            Self::OutOfMemory(oom) => Some(oom),
            Self::Stage(stage) => match &stage.cause {
                Cause::OutOfMemory(oom) => Some(oom),
                Cause::Error(error) => error.out_of_memory(),
                Cause::Panic(_) => None,
            },
            Self::World(WorldError::RankFailed { cause, .. }) => match cause.as_deref()? {
                RankCause::OutOfMemory(oom) => Some(oom),
                RankCause::NonFinite(_) => None,
            },
            _ => None,
        }
    }

    /// The loss or gradient that was refused because it is not finite, be it here, in a stage of a pipeline
    /// or on another rank.
    pub fn non_finite(&self) -> Option<NonFiniteValue> {
        match self {
            Self::Loss(LossError::NonFinite { value, .. }) => Some(NonFiniteValue::Loss(*value)),
            Self::Step(StepError::NonFiniteGradient { .. } | StepError::NonFiniteSum { .. }) => {
                Some(NonFiniteValue::Gradient)
            }
            Self::Stage(stage) => match &stage.cause {
                Cause::Error(error) => error.non_finite(),
                Cause::OutOfMemory(_) | Cause::Panic(_) => None,
            },
            Self::World(WorldError::RankFailed { cause, .. }) => match cause.as_deref()? {
                RankCause::NonFinite(value) => Some(*value),
                RankCause::OutOfMemory(_) => None,
            },
            _ => None,
        }
    }
}

/// The action right before this one that has its graph look at weights that are there.
fn remade(action: Action) -> Action {
    let kind = match action.kind {
        ActionKind::WeightGradient => ActionKind::InputGradient,
        _ => ActionKind::Recompute,
    };
    Action { kind, ..action }
}

/// So many differences are told of in one message.
const LISTED: usize = 8;

fn listed(differences: &[String]) -> String {
    let told = differences.iter().take(LISTED).map(String::as_str).collect::<Vec<_>>().join("; ");
    match differences.len().saturating_sub(LISTED) {
        0 => told,
        more => format!("{told}; and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oom;

    #[test]
    fn a_step_that_cannot_be_taken_back_is_not_out_of_memory_and_says_nothing_else() {
        let out = Error::Torch("out of memory in arena 'host': asked for 4 bytes".into());
        assert!(oom::recognise(&out.to_string()).is_some());
        let told = PipelineError::partly_updated(2, &out).to_string();
        assert!(told.contains("asked for 4 bytes") && oom::recognise(&told).is_none(), "{told}");
        for undone in [
            LossError::NonFinite { term: 0, micro_batch: 1, value: f64::NAN, weight: 1.0 }.into(),
            Error::from(StepError::NonFiniteGradient { micro_batch: 1 }),
        ] {
            assert!(undone.to_string().contains(NOTHING_CHANGED), "{undone}");
            let told = PipelineError::partly_updated(2, &undone).to_string();
            assert!(!told.contains("nothing was changed"), "{told}");
        }
    }
}
