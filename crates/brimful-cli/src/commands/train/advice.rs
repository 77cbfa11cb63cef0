//! Advice after a failed step, in terms of the command line.

use std::fmt;

use anyhow::Result;
use brimful::auto::DoesNotFit;
use brimful::loss::NonFiniteValue;
use brimful::memory::OutOfMemory;
use brimful::optim::Method;
use brimful::schedule::Recompute;
use brimful::{Bytes, Error, Layers, MicroBatches};
use tch::Tensor;
use tch::nn::VarStore;

use super::offload::{LeastBytes, OffloadArgument};
use super::{TrainOptions, Trainer};
use crate::exit::{does_not_fit, ran_out};
use crate::output;
use crate::setting::NumberType;

/// Bytes that a step needs for any size of its micro-batches.
#[derive(Debug, Clone, Copy)]
pub(super) struct FixedBytes {
    parameters: u64,
    gradients: u64,
    /// Bytes of the optimizer's state.
    state: u64,
    /// Bytes of the largest gradient, which exists beside the sum that it is added to.
    largest_gradient: u64,
    optimizer: &'static str,
}

impl FixedBytes {
    /// Returns the bytes of a model and its optimizer, once the optimizer's state exists.
    pub(super) fn of(store: &VarStore, method: &Method) -> Self {
        let bytes = |tensor: &Tensor| (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64;
        let mut trained = store.trainable_variables();
        trained.retain(Tensor::requires_grad);
        let gradients = trained.iter().map(bytes).sum();
        let kept = |tensor: &Tensor| bytes(tensor) as f64 * method.state_factor_in(tensor.kind());
        Self {
            parameters: store.variables().values().map(bytes).sum(),
            gradients,
            state: trained.iter().map(kept).sum::<f64>() as u64,
            largest_gradient: trained.iter().map(bytes).max().unwrap_or(0),
            optimizer: method.name(),
        }
    }

    fn total(&self) -> u64 {
        self.parameters + self.gradients + self.state + self.largest_gradient
    }
}

impl fmt::Display for FixedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [parameters, gradients, state, total] =
            [self.parameters, self.gradients + self.largest_gradient, self.state, self.total()]
                .map(Bytes);
        write!(
            f,
            "parameters ({parameters}), gradients ({gradients}) and the optimizer state of {} ({state}) take \
             {total}",
            self.optimizer
        )
    }
}

/// Sizes of a model that advice depends on.
#[derive(Debug, Clone, Copy)]
pub(super) struct ModelSize {
    layers: usize,
    least: LeastBytes,
}

impl ModelSize {
    pub(super) fn of(layers: &Layers, options: &TrainOptions) -> Result<Self> {
        Ok(Self { layers: layers.len(), least: LeastBytes::of(layers, options)? })
    }

    /// Lists the options that are not in use yet, save memory and may be enough.
    fn remedies(self, options: &TrainOptions) -> Vec<&'static str> {
        let stages = &options.stages;
        let is_offloaded = stages.offload == OffloadArgument::All;
        let fits = |least: u64| options.memory_limit.is_none_or(|limit| least <= limit.0);
        let recomputes = stages.recompute == Some(Recompute::Always);
        let has_finer = stages.stages.unwrap_or(1) < self.layers;
        let is_wide =
            matches!(options.dtype(), NumberType::F64 | NumberType::F32 | NumberType::Tf32);
        let cut = if stages.stages.is_some() {
            "give more --stages"
        } else {
            "split the model by --stages"
        };
        let remedies = [
            (options.memory_limit.is_some(), "raise --memory-limit"),
            (options.memory_limit.is_none(), "use a smaller model"),
            (stages.stages.is_some() && !recomputes, "recompute activations by --recompute always"),
            (has_finer && !is_offloaded && fits(self.least.of_stage), cut),
            (
                !is_offloaded && fits(self.least.offloaded),
                "offload it to the host by --offload all",
            ),
            (is_wide, "use --dtype bf16"),
        ];
        remedies.into_iter().filter_map(|(helps, remedy)| helps.then_some(remedy)).collect()
    }
}

/// Joins remedies as `a, b, or c`.
fn listed(remedies: &[&str]) -> String {
    match remedies {
        [] => String::new(),
        [only] => (*only).to_owned(),
        [others @ .., last] => format!("{}, or {last}", others.join(", ")),
    }
}

/// Returns the error of a model that could not be built, with remedies if memory ran out.
pub(super) fn of_building(
    error: anyhow::Error,
    size: ModelSize,
    options: &TrainOptions,
) -> anyhow::Error {
    if !ran_out(&error) {
        return error;
    }
    // Nothing has run yet, so no activations are kept for a backward.
    let mut remedies = size.remedies(options);
    remedies.retain(|remedy| !remedy.contains("--recompute"));
    does_not_fit(format!("{}: {}", output::causes(&error), listed(&remedies)))
}

impl Trainer {
    /// Returns the error of a test, with a remedy for a non-finite loss.
    pub(super) fn advise_after_test(&self, cause: Error) -> anyhow::Error {
        let (steps, learning_rate) = (self.steps_done(), self.rate);
        match cause.non_finite() {
            Some(value) => anyhow::anyhow!(
                "{value} in the test after step {steps}: the weights are broken; lower --learning-rate (it is \
                 {learning_rate:?}), or look at the data"
            ),
            None => self.advise(cause),
        }
    }

    /// Returns the library's error of a step, with a remedy if one is known.
    pub(super) fn advise(&self, cause: Error) -> anyhow::Error {
        if let Some(value) = cause.non_finite() {
            return self.of_numbers(value);
        }
        if let Error::DoesNotFit(end) = &cause {
            return match self.fixed_remedy(&end.cause) {
                Some(remedy) => does_not_fit(format!("{}; {remedy}", end.cause)),
                None => does_not_fit(format!("{}; {}", end.cause, self.smaller(end))),
            };
        }
        let remedies = || listed(&self.size.remedies(&self.options));
        match cause.out_of_memory().map(|oom| self.remedy(oom).unwrap_or_else(remedies)) {
            Some(remedy) => {
                let told = format!("{cause}; {remedy}");
                anyhow::Error::from(cause).context(told)
            }
            None => cause.into(),
        }
    }

    /// Says that a single sample does not fit, for a step whose fixed bytes are unknown.
    fn smaller(&self, end: &DoesNotFit) -> String {
        format!(
            "a micro-batch of one sample does not fit into the {} of free memory either: {}",
            end.available,
            listed(&self.size.remedies(&self.options))
        )
    }

    fn of_numbers(&self, value: NonFiniteValue) -> anyhow::Error {
        let (epoch, step) = (self.epoch + 1, self.running.steps + 1);
        let learning_rate = self.learning_rate();
        anyhow::anyhow!(
            "{value} in epoch {epoch}, step {step}: this step was not applied; lower --learning-rate (it \
             is {learning_rate:?}), or look at the data"
        )
    }

    fn remedy(&self, oom: &OutOfMemory) -> Option<String> {
        self.fixed_remedy(oom).or_else(|| {
            let batch_size = self.cut.largest();
            let size = self.options.given_micro_batch(batch_size).filter(|size| *size > 1)?;
            let smaller = self.most_that_fits(oom).unwrap_or(size).min(size.div_ceil(2));
            Some(match self.options.size() {
                MicroBatches::Count(_) => {
                    format!("try --num-micro-batches {}", batch_size.div_ceil(smaller))
                }
                _ => format!("try --micro-batch-size {smaller}"),
            })
        })
    }

    /// Says that not even a single sample would fit, if the fixed bytes show it.
    fn fixed_remedy(&self, oom: &OutOfMemory) -> Option<String> {
        let (fixed, limit) = (self.engine.fixed_bytes()?, oom.limit?);
        let fits_none = fixed.total() > limit.0 || self.most_that_fits(oom) == Some(0);
        fits_none.then(|| {
            let mut remedies = self.size.remedies(&self.options);
            if fixed.state > 0 {
                remedies.insert(1, "use --optimizer sgd, which has less state");
            }
            format!(
                "{fixed} at any micro-batch size, and the limit is {limit}: {}",
                listed(&remedies)
            )
        })
    }

    /// Estimates the largest micro-batch that fits from what the failed one needed. It may still fail, because the
    /// failed one might have needed more later.
    fn most_that_fits(&self, oom: &OutOfMemory) -> Option<usize> {
        let (fixed, limit) = (self.engine.fixed_bytes()?, oom.limit?);
        let size = self.options.given_micro_batch(self.cut.largest())?;
        let needed = oom.in_use?.0 + oom.asked?.0;
        // The first step creates the optimizer's state.
        let is_first = self.steps_done() == 0;
        let there = fixed.total() - if is_first { fixed.state } else { 0 };
        let each = needed.saturating_sub(there).div_ceil(size as u64);
        let left = limit.0.saturating_sub(fixed.total());
        left.checked_div(each).map(|most| most as usize)
    }
}
