//! Everything that can go wrong, with the numbers and the remedy.

use std::error::Error as StdError;
use std::sync::Arc;

use brimful_plan::balance::BalanceError;
use brimful_plan::bytes::{Bytes, BytesError};
use brimful_plan::plan::PlanError;
use brimful_plan::schedule::{CostError, ScheduleError};
use brimful_plan::split::SplitError;
use tch::TchError;
use thiserror::Error;

use crate::oom::{self, OutOfMemory};
use crate::pipeline::{PipelineError, StageError};
use crate::replicas::ReplicasError;
use crate::report::RunError;
use crate::workers::WorkerError;
use crate::world::WorldError;

/// What a call of this library can fail with.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum Error {
    /// Memory ran out.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),

    /// Memory runs out whatever the size of the micro-batches.
    #[error(
        "memory runs out even with a micro-batch of one sample ({}): {}{available} free; \
         recompute activations, take a smaller model or number type, or spread the layers over \
         more devices. The last report: {cause}",
        tried_in_words(tried), needed.map(|needed| format!("about {needed} needed, ")).unwrap_or_default()
    )]
    DoesNotFit {
        /// The sizes that were tried.
        tried: Vec<usize>,
        /// What one sample was expected to need, where that is known.
        needed: Option<Bytes>,
        /// What was free.
        available: Bytes,
        /// How the last try ended.
        cause: Box<OutOfMemory>,
    },

    /// What was run to learn from is over, and to be taken back. Never leaves the library.
    #[doc(hidden)]
    #[error("a rehearsal is over")]
    Rehearsed,

    /// A replayed micro-batch is not what the closure does now. Never leaves the library.
    #[doc(hidden)]
    #[error("what was captured is out of date")]
    OutOfDate,

    /// What was lent to a closure or a layer is not what it was.
    #[error(
        "tensor {leaf} of a micro-batch was changed in place, but it is the mini-batch itself, which \
         may be run again: make a new tensor (x / 255.0 instead of x /= 255.0), or change a copy"
    )]
    BatchChanged {
        /// Which of the mini-batch's tensors, counted from 0.
        leaf: usize,
    },

    /// libtorch refused a call, in its own words.
    #[error("libtorch: {0}")]
    Torch(String),

    /// A limit of nothing.
    #[error(
        "{memory} cannot have a limit of 0 bytes: give it at least what the model needs, or none"
    )]
    LimitOfZero {
        /// The arena's name, or the device's.
        memory: String,
    },

    /// A limit that is exceeded already.
    #[error(
        "{memory} cannot be limited to {limit}: {in_use} are in use; free tensors first or set the \
         limit to at least that"
    )]
    LimitBelowUse {
        /// The arena's name, or the device's.
        memory: String,
        /// The limit that was asked for.
        limit: Bytes,
        /// What is in use.
        in_use: Bytes,
    },

    /// A device that is not here.
    #[error("there is no device '{asked}' here; there is {available}{hint}")]
    NoDevice {
        /// The name that was asked for.
        asked: String,
        /// The names that there are.
        available: String,
        /// Why one may be missing, when that is known.
        hint: String,
    },

    /// A text that is not a number of bytes.
    #[error(transparent)]
    Bytes(#[from] BytesError),

    /// A layer without a whole name.
    #[error(
        "layer {position} cannot be named '{name}': its variables are saved under that name, so \
         give it one, without '.' at either end or two in a row"
    )]
    LayerName {
        /// Its place in the list, from 0.
        position: usize,
        /// The name.
        name: String,
    },

    /// Two layers of one name.
    #[error("layers {first} and {second} are both named '{name}': rename one of them")]
    LayerTwice {
        /// The name.
        name: String,
        /// The place of the first one, from 0.
        first: usize,
        /// The place of the second one.
        second: usize,
    },

    /// A layer whose name lies inside another's.
    #[error(
        "layer {second}, '{inner}', lies inside layer {first}, '{outer}', so that their variables \
         could have the same names: rename one of them"
    )]
    LayerInside {
        /// The shorter name.
        outer: String,
        /// Its place in the list, from 0.
        first: usize,
        /// The longer name.
        inner: String,
        /// Its place in the list.
        second: usize,
    },

    /// A layer that shares with one that is not there before it.
    #[error(
        "layer {position}, '{name}', shares the variables of '{owner}', which is not among the \
         layers before it: put that one first, or correct the name"
    )]
    LayerShares {
        /// Its place in the list, from 0.
        position: usize,
        /// Its name.
        name: String,
        /// The name of the layer that it would share with.
        owner: String,
    },

    /// A pop of what nobody stashes.
    #[error(
        "layer {position}, '{name}', pops '{skip}', which is stashed neither in its own list nor in \
         one around it: add `.stash(\"{skip}\")` before it"
    )]
    SkipUnknown {
        /// The layer's place in the list, counted from 0.
        position: usize,
        /// The layer's name.
        name: String,
        /// What it asks for.
        skip: String,
    },

    /// A pop that comes before its stash.
    #[error(
        "layer {position}, '{name}', pops '{skip}', which is stashed only later, by layer {stash}: \
         move the stash before it"
    )]
    SkipTooEarly {
        /// The layer's place in the list, counted from 0.
        position: usize,
        /// The layer's name.
        name: String,
        /// What it asks for.
        skip: String,
        /// The place of the stash.
        stash: usize,
    },

    /// A stash that nobody pops.
    #[error("layer {position} stashes '{skip}', which no layer pops: pop it, or remove it")]
    SkipUnused {
        /// The stash's place in the list, counted from 0.
        position: usize,
        /// Its name.
        skip: String,
    },

    /// A range that is not in the list.
    #[error("there are no layers {start} to {end}: the model has {len}")]
    LayerRange {
        /// The first layer asked for.
        start: usize,
        /// The end of the range.
        end: usize,
        /// How many layers there are.
        len: usize,
    },

    /// A layer whose building failed.
    #[error("layer '{layer}' could not be built: {message}")]
    LayerBuild {
        /// The layer's name.
        layer: String,
        /// What the panic said.
        message: String,
    },

    /// A layer whose forward failed.
    #[error("layer '{layer}' could not be run on an input of shape {shape:?}: {message}")]
    LayerRun {
        /// The layer's name.
        layer: String,
        /// The shape of its input.
        shape: Vec<i64>,
        /// What the panic said.
        message: String,
    },

    /// A batch without samples.
    #[error("the batch is empty: give it at least one sample")]
    EmptyBatch,

    /// Samples that cannot be cut as asked.
    #[error(transparent)]
    Split(SplitError),

    /// Leaves of a batch that do not have the same samples.
    #[error(
        "the leaves of a batch must have one length, but are {} long: give each the same samples, \
         and wrap what all micro-batches share in `Shared`",
        enumerate(lengths)
    )]
    LeafLengthsDiffer {
        /// The lengths of the leaves that are cut, in the order of the fields.
        lengths: Vec<usize>,
    },

    /// A leaf without a first dimension.
    #[error(
        "leaf {leaf} of the batch (counted from 0) is a single number, which cannot be cut: wrap \
         it in `Shared`, or give it a value for each sample"
    )]
    LeafOfOneNumber {
        /// The leaf's place, counted from 0.
        leaf: usize,
    },

    /// A batch of shared values, or of none.
    #[error("the batch has nothing to cut: give it a tensor that is not `Shared`")]
    NothingToCut,

    /// Samples that a leaf does not have.
    #[error(
        "samples {start}..{end} cannot be cut out of leaf {leaf} of the batch (counted from 0), \
         which is {length} long: `batch::len` says how many there are"
    )]
    SliceOutsideBatch {
        /// The first sample that was asked for.
        start: usize,
        /// The one after the last.
        end: usize,
        /// The leaf's place, counted from 0.
        leaf: usize,
        /// The samples that it has.
        length: usize,
    },

    /// A loss that is not one number.
    #[error(
        "term {term} of the loss (counted from 0) has the shape {shape:?}: reduce it to one number, \
         by a mean or a sum"
    )]
    LossNotScalar {
        /// The term's place, counted from 0.
        term: usize,
        /// Its shape.
        shape: Vec<i64>,
    },

    /// A loss that no backward can start from.
    #[error(
        "term {term} of the loss (counted from 0) has no gradient: it does not depend on a \
         trainable parameter, or was computed under no_grad or detached"
    )]
    LossWithoutGradient {
        /// The term's place, counted from 0.
        term: usize,
    },

    /// A weight that is not one number.
    #[error(
        "the weight of term {term} of the loss (counted from 0) has the shape {shape:?}: sum it to \
         one number"
    )]
    WeightNotScalar {
        /// The term's place, counted from 0.
        term: usize,
        /// The weight's shape.
        shape: Vec<i64>,
    },

    /// Losses of another make in a later micro-batch.
    #[error(
        "a micro-batch's loss has {now} terms where the ones before had {before}, or of other \
         kinds: build the same loss for every micro-batch"
    )]
    TermsDiffer {
        /// Terms of the micro-batches before.
        before: usize,
        /// Terms of this one.
        now: usize,
    },

    /// Nothing to divide by.
    #[error(
        "the weights of term {term} of the loss (counted from 0) sum to 0 over the mini-batch: \
         there is nothing to take a mean over, so leave the mini-batch out"
    )]
    ZeroDenominator {
        /// The term's place, counted from 0.
        term: usize,
    },

    /// A loss that is infinite or no number.
    #[error(
        "term {term} of the loss (counted from 0) is {value} (weight {weight}) in micro-batch \
         {micro_batch}: nothing was changed; lower the learning rate or look at the data, use \
         `Loss::ratio` where a micro-batch may have a weight of 0, or allow it by `NonFinite::Allow`"
    )]
    NonFiniteLoss {
        /// The term's place, counted from 0.
        term: usize,
        /// The micro-batch, counted from 0.
        micro_batch: usize,
        /// The value.
        value: f64,
        /// Its weight.
        weight: f64,
    },

    /// A gradient that is infinite or no number.
    #[error(
        "a gradient is not finite from micro-batch {micro_batch} on: nothing was changed; lower the \
         learning rate or look at the data, or allow it by `NonFinite::RefuseLoss`"
    )]
    NonFiniteGradient {
        /// The micro-batch, counted from 0.
        micro_batch: usize,
    },

    /// A gradient that is not plain numbers, which cannot be summed over micro-batches.
    #[error(
        "the gradient of '{parameter}' is sparse: nothing was changed; build its layer with \
         `sparse: false`"
    )]
    SparseGradient {
        /// The parameter's name.
        parameter: String,
    },

    /// A commit of nothing.
    #[error("there is nothing to commit: call `accumulate` first")]
    NothingAccumulated,

    /// A whole step between the parts of another.
    #[error(
        "{samples} samples have been accumulated and not committed: call `commit` before the next \
         `backward`"
    )]
    WindowOpen {
        /// Samples that wait.
        samples: usize,
    },

    /// A window whose sums are of other parameters than those that are trained now.
    #[error(
        "{samples} samples have been accumulated for {then} trained parameters, and now {now} are, or \
         others: freeze and thaw parameters before a window's first `accumulate` or after its `commit`"
    )]
    TrainedChanged {
        /// Samples that wait.
        samples: usize,
        /// Parameters that were trained when the first of them were run.
        then: usize,
        /// Those that are trained now.
        now: usize,
    },

    /// What needs all samples in one process.
    #[error(
        "a loss over the whole mini-batch needs all samples in one process, but there are {ranks} \
         ranks: leave the world out, or use a loss that is a sum over samples"
    )]
    NotOverRanks {
        /// How many there are.
        ranks: usize,
    },

    /// Outputs that a loss over the whole mini-batch cannot be traced back through.
    #[error(
        "output {leaf} (counted from 0) cannot take a gradient in parts: return one row a sample, \
         and nothing in `Shared`"
    )]
    OutputNotRows {
        /// The output's place, counted from 0.
        leaf: usize,
    },

    /// An input that a BatchNorm layer is not made for.
    #[error(
        "a BatchNorm layer of {channels} channels takes an input of {} dimensions with the channels \
         second, but got the shape {shape:?}",
        enumerate(dimensions)
    )]
    BatchNormInput {
        /// Numbers of dimensions that the layer takes.
        dimensions: &'static [usize],
        /// Its channels.
        channels: i64,
        /// The input's shape.
        shape: Vec<i64>,
    },

    /// An error of the user's own closure.
    #[error(transparent)]
    Closure(ClosureError),

    /// No part at all.
    #[error("there is nothing to join: give at least one part")]
    NothingToJoin,

    /// Parts that are not cuts of one batch.
    #[error(
        "part {part} (counted from 0) cannot be joined to part 0: it has {other} where that has \
         {first}; parts may differ in their samples alone, so make a number that differs a tensor"
    )]
    PartsDiffer {
        /// The place of the part that is unlike the first.
        part: usize,
        /// What the first part has.
        first: String,
        /// What this part has in its stead.
        other: String,
    },

    /// An option of an optimizer that makes no sense.
    #[error("{option} cannot be {value}: {remedy}")]
    BadOption {
        /// The option's name.
        option: &'static str,
        /// What it was set to.
        value: String,
        /// What it may be.
        remedy: &'static str,
    },

    /// A tensor that no optimizer can update.
    #[error("parameter '{parameter}' cannot be optimized: {reason}")]
    BadParameter {
        /// Its name.
        parameter: String,
        /// Why, and what to do.
        reason: String,
    },

    /// A parameter group without a parameter.
    #[error(
        "group '{group}' matches none of the {parameters} parameters (the first is '{first}'): \
         mend its condition or leave it out"
    )]
    EmptyGroup {
        /// The group's name.
        group: String,
        /// How many parameters there are.
        parameters: usize,
        /// The name of the first one.
        first: String,
    },

    /// A parameter group that cannot be made.
    #[error("group '{group}' cannot be made: {reason}")]
    BadGroup {
        /// The group's name.
        group: String,
        /// Why, and what to do.
        reason: String,
    },

    /// A parameter group that does not exist.
    #[error("there is no group '{group}'; there is {known}")]
    NoGroup {
        /// The name that was asked for.
        group: String,
        /// The names that there are.
        known: String,
    },

    /// A saved state that belongs to another model or optimizer.
    #[error(
        "the saved optimizer state does not fit: '{name}' is {saved} in it, but {here} here; load \
         the state that was saved with this model, optimizer and groups"
    )]
    StateMismatch {
        /// What differs: a parameter, one of its state's tensors, or a group.
        name: String,
        /// What the saved state has.
        saved: String,
        /// What the optimizer has.
        here: String,
    },

    /// Gradients were needed, and there are none.
    #[error("none of the {parameters} parameters has a gradient: run backward first")]
    NoGradient {
        /// How many parameters were looked at.
        parameters: usize,
    },

    /// A file that cannot be read or written.
    #[error("cannot {action} '{path}': {reason}")]
    File {
        /// What was tried: `read` or `write`.
        action: &'static str,
        /// The file.
        path: String,
        /// Why not.
        reason: String,
    },

    /// A file that holds something else than whole tensors.
    #[error("'{path}' is damaged, or not a safetensors file: {reason}")]
    NotTensors {
        /// The file.
        path: String,
        /// What gave it away.
        reason: String,
    },

    /// A schedule that cannot be made, read or run.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),

    /// Costs that cannot be simulated.
    #[error(transparent)]
    Cost(#[from] CostError),

    /// Layers that cannot be spread over the stages.
    #[error(transparent)]
    Balance(#[from] BalanceError),

    /// A question that the planner cannot answer.
    #[error(transparent)]
    Plan(#[from] PlanError),

    /// A file that cannot be read as a run.
    #[error(transparent)]
    Run(#[from] RunError),

    /// A thread of a pipeline or of replicas that failed as such.
    #[error(transparent)]
    Workers(#[from] WorkerError),

    /// A pipeline that cannot be built or used as asked.
    #[error(transparent)]
    Pipeline(#[from] PipelineError),

    /// Replicas that cannot be built.
    #[error(transparent)]
    Replicas(#[from] ReplicasError),

    /// A stage of a pipeline that failed.
    #[error(transparent)]
    Stage(Box<StageError>),

    /// Ranks cannot go on together.
    #[error(transparent)]
    World(#[from] WorldError),
}

/// An error that a user's closure returned, as it was.
#[derive(Debug, Clone, Error)]
#[error(transparent)]
pub struct ClosureError(pub Arc<dyn StdError + Send + Sync>);

impl PartialEq for ClosureError {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

fn tried_in_words(sizes: &[usize]) -> String {
    match sizes {
        [] => "before the first one was run".into(),
        sizes => format!("tried {}", enumerate(sizes)),
    }
}

/// `8, 8 and 6`.
fn enumerate(lengths: &[usize]) -> String {
    let words: Vec<String> = lengths.iter().map(usize::to_string).collect();
    match words.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, others)) => format!("{} and {last}", others.join(", ")),
        None => String::new(),
    }
}

impl Error {
    /// An error of the user's closure: one of ours or of libtorch as it is, another in its own words.
    pub(crate) fn of_closure(error: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        let error = match error.into().downcast::<Self>() {
            Ok(ours) => return *ours,
            Err(other) => other,
        };
        match error.downcast::<TchError>() {
            Ok(torch) => Self::from(*torch),
            Err(other) => match out_of_memory_in(&*other) {
                Some(oom) => Self::OutOfMemory(oom),
                None => Self::Closure(ClosureError(other.into())),
            },
        }
    }
}

/// The report of memory that ran out, under whatever was said around it.
fn out_of_memory_in(error: &(dyn StdError + 'static)) -> Option<OutOfMemory> {
    oom::recognise(&error.to_string()).or_else(|| error.source().and_then(out_of_memory_in))
}

impl From<SplitError> for Error {
    fn from(error: SplitError) -> Self {
        match error {
            // One error for a batch without samples, whoever notices it first.
            SplitError::NoSamples => Self::EmptyBatch,
            other => Self::Split(other),
        }
    }
}

impl From<StageError> for Error {
    fn from(error: StageError) -> Self {
        Self::Stage(Box::new(error))
    }
}

impl From<TchError> for Error {
    fn from(error: TchError) -> Self {
        let text = match error {
            TchError::Torch(text) => text,
            other => other.to_string(),
        };
        // What follows the first line is a backtrace.
        let message = || text.lines().next().unwrap_or_default().to_owned();
        oom::recognise(&text).map_or_else(|| Self::Torch(message()), Self::OutOfMemory)
    }
}

impl From<brimful_torch::TorchError> for Error {
    fn from(error: brimful_torch::TorchError) -> Self {
        oom::from_torch(&error).map_or(Self::Torch(error.message), Self::OutOfMemory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_tch_keeps_its_sentence_and_loses_its_backtrace() {
        let error = TchError::Torch("sizes differ\nException raised from cat\nframe #0".into());
        assert_eq!(Error::from(error), Error::Torch("sizes differ".into()));
        let error = Error::from(TchError::Torch("CUDA out of memory. Tried to allocate".into()));
        assert!(matches!(error, Error::OutOfMemory(_)), "{error:?}");
    }
}
