//! Errors of building and using a pipeline, and of its stages.

use thiserror::Error;

use crate::Error;
use crate::loss::LossError;
use crate::oom::OutOfMemory;
use crate::step::StepError;
use crate::world::WorldError;
use brimful_plan::bytes::Bytes;
use brimful_plan::schedule::{Action, ActionKind, StageId};

/// Pipeline that cannot be built or used as asked.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PipelineError {
    /// Automatic offload without a sample.
    #[error("Offload::Auto measures the layers: give it a micro-batch by Builder::sample")]
    NoSample,
    /// Automatic offload of several replicas or ranks.
    #[error(
        "Offload::Auto plans one pipeline in one process, and replicas or ranks would each measure their own: choose \
         Offload::Host or Offload::Device"
    )]
    OffloadOfSeveral,
    /// Model without a layer.
    #[error("the model has no layer: add at least one")]
    NoLayers,
    /// More stages than the devices can take.
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
    /// Balance that leaves a device with fewer stages than the others.
    #[error(
        "the schedule puts {per_device} stages on each device, but the balance has {stages}: give a \
         balance of a multiple of {per_device} stages"
    )]
    UnevenStages {
        /// Stages in the balance.
        stages: usize,
        /// Stages that the schedule puts on a device.
        per_device: usize,
    },
    /// Actions for another placement of stages on devices than the pipeline's.
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
    /// Backward of an offloaded stage through a graph that was made before its weights left.
    #[error(
        "{action} needs stage {}'s weights, but device {device} has {device_buffers} buffers for offloaded \
         stages, and a different stage has reused the buffer since the graph was made: run {} right before \
         {action}, choose breadth-first, or offload at most {device_buffers} stages per device",
        action.stage,
        remade(*action)
    )]
    GraphOutlivesWeights {
        /// The backward.
        action: Action,
        /// The device, counted from 0.
        device: usize,
        /// Number of device buffers for offloaded stages.
        device_buffers: usize,
    },
    /// Backward of an offloaded stage whose weights have left, noticed when it is about to run.
    #[error(
        "its graph refers to weights whose device buffer was reused: recompute the stage (R) right before \
         its backward"
    )]
    WeightsLeft,
    /// Dtype of gradients on the host that does not go with the model's dtype.
    #[error(
        "gradients on the host in {gradients} need a model in bf16, but it is in {model}: build the model in \
         bf16, or keep its gradients in f32"
    )]
    GradientDtype {
        /// Dtype of the gradients.
        gradients: String,
        /// Dtype of the model's parameters.
        model: String,
    },
    /// Model with another number of output tensors than the closure takes.
    #[error(
        "the model gives {given} tensors, and the closure takes {taken}: let it take a `Vec<Tensor>`, \
         or a tuple of {given}"
    )]
    OutputCount {
        /// Tensors that the model returns.
        given: usize,
        /// Tensors that the closure takes.
        taken: usize,
    },
    /// Devices that cannot be divided evenly among several pipelines.
    #[error(
        "{devices} devices cannot be divided equally among {replicas} replicas: give a multiple of \
         {replicas} devices"
    )]
    UnevenReplicas {
        /// Number of devices.
        devices: usize,
        /// Number of pipelines.
        replicas: usize,
    },
    /// Input that has a graph or requires a gradient.
    #[error(
        "input {leaf} requires a gradient, but a pipeline does not compute gradients of inputs: make the \
         computation of the input a layer, or detach the input"
    )]
    InputGradient {
        /// Index of the tensor in the mini-batch, from 0.
        leaf: usize,
    },
    /// Separate forward with an automatic size: a retry must include the backward.
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
    /// Updates in the backward, with a loss whose denominator is known only at the end.
    #[error(
        "updates run in the backward, but the denominator of this loss is known only after all \
         micro-batches: use `Loss::mean`, or update after the backward (`update_in_backward(false)`)"
    )]
    UnknownInBackward,
    /// Updates in the backward, in a step of several mini-batches or several workers.
    #[error(
        "updates in the backward need a step of one mini-batch in one pipeline on one device: update after \
         the backward (`update_in_backward(false)`)"
    )]
    PartsInBackward,
    /// Updates in the backward, with actions that end a stage's backward before the gradient of a shared
    /// parameter is complete.
    #[error(
        "updates run in the backward, but stages {owner} and {user} share a parameter, and these actions \
         end stage {owner}'s backward first: run stage {user}'s weight gradients before the end of stage \
         {owner}'s backward, or update after the backward (`update_in_backward(false)`)"
    )]
    TooEarlyInBackward {
        /// Stage that owns the parameter.
        owner: StageId,
        /// Later stage that shares it.
        user: StageId,
    },
    /// Gradients that no update in the backward has taken.
    #[error(
        "updates run in the backward, but {parameters} parameters have gradients of before the optimizer was \
         made: make it before the first backward, or call `zero_grad` and run the step again"
    )]
    NotUpdatedInBackward {
        /// Number of parameters with a gradient.
        parameters: usize,
    },
    /// Step that failed after some of its updates in the backward.
    #[error(
        "the step failed after updates of {stages} stages had begun in the backward, so the parameters are \
         inconsistent: load the last checkpoint. Cause: {cause}"
    )]
    PartlyUpdated {
        /// Number of updated stages.
        stages: usize,
        /// Error that the step failed with.
        cause: String,
    },
    /// Gradients that cannot be clipped, because updates in the backward have consumed some.
    #[error(
        "updates run in the backward, so the gradients of {stages} stages are gone, and the norm would miss \
         them: to clip, update after the backward (`update_in_backward(false)`)"
    )]
    ClippedInBackward {
        /// Number of stages without gradients.
        stages: usize,
    },
    /// Offload settings for another number of stages than the pipeline's.
    #[error(
        "locations of {given} stages were given, but the pipeline has {stages} stages: give one per stage"
    )]
    WrongLocations {
        /// Number of settings given.
        given: usize,
        /// Number of stages.
        stages: usize,
    },
    /// Host memory too small for the offloaded stages.
    #[error(
        "{stages} offloaded stages need {needed} of host memory (weights, gradients and the optimizer's \
         state), but {free} are free: offload fewer stages, choose a smaller dtype or an optimizer with \
         less state, or use more devices"
    )]
    HostTooSmall {
        /// Number of offloaded stages.
        stages: usize,
        /// Bytes that they need.
        needed: Bytes,
        /// Bytes that the host has for them.
        free: Bytes,
    },
    /// Outputs without a gradient from any loss.
    #[error("the outputs have no gradient: compute a loss from them and call its `backward` first")]
    NoOutputGradient,
    /// Condition on names that no variable satisfies.
    #[error("no variable's name satisfies the condition; the first of {variables} is '{first}'")]
    NoSuchVariable {
        /// Number of variables.
        variables: usize,
        /// Name of the first one.
        first: String,
    },
    /// Saved variables that differ from the model's.
    #[error("{}: load what was saved from this model", listed(differences))]
    Mismatch {
        /// Differences, each with the variable in the file and in the model.
        differences: Vec<String>,
    },
    /// Exact BatchNorms on several devices, replicas or ranks.
    #[error(
        "exact BatchNorm needs all samples on one device, but there are {devices} devices, {replicas} \
         replicas and {ranks} ranks: give the pipeline one device, or use `BatchNormPolicy::Deferred`"
    )]
    ExactOnSeveral {
        /// Devices of this process.
        devices: usize,
        /// Number of pipelines.
        replicas: usize,
        /// Number of ranks.
        ranks: usize,
    },
    /// Exact BatchNorm without a layer before it.
    #[error(
        "the first layer, '{layer}', is an exact BatchNorm, but there must be a layer before it, for whose \
         outputs it can wait: add one, such as `.add_fn(\"input\", |x| x * 1.0)`"
    )]
    ExactFirst {
        /// Name of the layer.
        layer: String,
    },
    /// Actions that let a micro-batch pass an exact BatchNorm before all micro-batches have reached it.
    #[error(
        "the next action passes an exact BatchNorm, which only {came} of {micro_batches} micro-batches have \
         reached: give a list of actions in which each stage runs all micro-batches before the next stage \
         runs one"
    )]
    NotAllMet {
        /// Micro-batches that have reached it.
        came: usize,
        /// Micro-batches of the step.
        micro_batches: usize,
    },
    /// Input that recomputation needs, but that a layer changed in place.
    #[error(
        "a layer changed the stage's input in place, but recomputation needs the input: let the stage's \
         first layer make a new tensor, or do not recompute"
    )]
    InputChanged,
    /// In-place change of a tensor that gets a gradient, which libtorch refuses.
    #[error(
        "it changes a tensor in place that needs a gradient (its stage's input, or a parameter): make a new \
         tensor (`relu` for `relu_`), or merge the layer with the one before"
    )]
    ChangesInPlace,
    /// Panic of a layer or the loss, with its message.
    #[error("it panicked: {0}")]
    Panicked(String),
}

/// Part of libtorch's message about a refused in-place change, of a tensor or of its view.
const REFUSED_IN_PLACE: &str =
    "leaf Variable that requires grad is being used in an in-place operation";

/// Phrase in errors of an undone step, between the cause and the remedy.
const NOTHING_CHANGED: &str = "nothing was changed; ";

impl PipelineError {
    /// Returns the error of a step that failed after updates of this many stages had begun.
    pub(crate) fn partly_updated(stages: usize, error: &Error) -> Self {
        // The cause may say that nothing was changed, which is wrong after an update.
        let cause = error.to_string().replace(NOTHING_CHANGED, "");
        Self::PartlyUpdated { stages, cause }
    }

    /// Returns the error of a layer's or a loss's panic. libtorch's own message about in-place changes
    /// names neither the stage nor a remedy.
    pub(crate) fn of_panic(words: String) -> Self {
        match words.contains(REFUSED_IN_PLACE) {
            true => Self::ChangesInPlace,
            false => Self::Panicked(words),
        }
    }
}

impl Error {
    /// Returns this error's out-of-memory report, if memory ran out in this process or in another rank.
    pub fn out_of_memory(&self) -> Option<&OutOfMemory> {
        match self {
            Self::OutOfMemory(oom) => Some(oom),
            Self::Stage { cause, .. } => cause.out_of_memory(),
            Self::World(WorldError::RankFailed { out_of_memory, .. }) => out_of_memory.as_deref(),
            _ => None,
        }
    }

    /// Describes the non-finite loss or gradient that was refused in this process or in another rank, for example
    /// `the loss is NaN`.
    pub fn non_finite(&self) -> Option<String> {
        match self {
            Self::Loss(LossError::NonFinite { value, .. }) => Some(format!("the loss is {value}")),
            Self::Step(StepError::NonFiniteGradient { .. } | StepError::NonFiniteSum { .. }) => {
                Some("a gradient is infinite or no number".to_owned())
            }
            Self::Stage { cause, .. } => cause.non_finite(),
            Self::World(WorldError::RankFailed { non_finite, .. }) => non_finite.clone(),
            _ => None,
        }
    }
}

/// Returns the action to run right before `action`, so that the graph of `action` refers to weights on the device.
fn remade(action: Action) -> Action {
    let kind = match action.kind {
        ActionKind::WeightGradient => ActionKind::InputGradient,
        _ => ActionKind::Recompute,
    };
    Action { kind, ..action }
}

/// Maximum number of differences that a message lists.
const LISTED: usize = 8;

fn listed(differences: &[String]) -> String {
    let reported =
        differences.iter().take(LISTED).map(String::as_str).collect::<Vec<_>>().join("; ");
    match differences.len().saturating_sub(LISTED) {
        0 => reported,
        more => format!("{reported}; and {more} more"),
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
        let reported = PipelineError::partly_updated(2, &out).to_string();
        assert!(
            reported.contains("asked for 4 bytes") && oom::recognise(&reported).is_none(),
            "{reported}"
        );
        for undone in [
            LossError::NonFinite { term: 0, micro_batch: 1, value: f64::NAN, weight: 1.0 }.into(),
            Error::from(StepError::NonFiniteGradient { micro_batch: 1 }),
        ] {
            assert!(undone.to_string().contains(NOTHING_CHANGED), "{undone}");
            let reported = PipelineError::partly_updated(2, &undone).to_string();
            assert!(!reported.contains("nothing was changed"), "{reported}");
        }
    }
}
