//! Advice after a failed step, in terms of the command line.

use std::fmt;

use anyhow::Result;
use brimful::internal::without_remedy;
use brimful::memory::OutOfMemory;
use brimful::optim::{Method, Sgd};
use brimful::schedule::Recompute;
use brimful::{Bytes, Error, Layers, MicroBatches};
use tch::Tensor;
use tch::nn::VarStore;

use super::offload::{LeastBytes, OffloadArgument};
use super::recipe::OptimizerName;
use super::{TrainOptions, Trainer};
use crate::exit::{does_not_fit, ran_out};
use crate::output;
use crate::setting::NumberType;

/// Bytes that a step needs at any micro-batch size.
#[derive(Debug, Clone, Copy)]
struct FixedBytes {
    parameters: u64,
    gradients: u64,
    /// Bytes of the optimizer's state.
    state: u64,
    /// Bytes that the momentum of SGD would take.
    momentum: u64,
    /// Bytes of the largest gradient, which exists beside the sum that it is added to.
    largest_gradient: u64,
    optimizer: &'static str,
}

impl FixedBytes {
    /// Returns the bytes of a model and its optimizer, once the optimizer's state exists.
    fn of(store: &VarStore, method: &Method) -> Self {
        let bytes = |tensor: &Tensor| (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64;
        let mut trained = store.trainable_variables();
        trained.retain(Tensor::requires_grad);
        let gradients = trained.iter().map(bytes).sum();
        let kept = |method: &Method| {
            let of_each = trained
                .iter()
                .map(|tensor| bytes(tensor) as f64 * method.state_factor_in(tensor.kind()));
            of_each.sum::<f64>() as u64
        };
        Self {
            parameters: store.variables().values().map(bytes).sum(),
            gradients,
            state: kept(method),
            momentum: kept(&Sgd::new(1.0).momentum(0.9).into()),
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

/// Divisor of a memory limit. An option is a remedy if its bytes without activations fit into this fraction of the
/// limit; the rest is for activations.
const WITH_ACTIVATIONS: u64 = 2;

/// Sizes of a model that advice depends on.
#[derive(Debug, Clone, Copy)]
struct ModelSize {
    layers: usize,
    /// Least memory of the model in the dtype of the run.
    least: LeastBytes,
    /// Least memory of the model in bf16.
    narrow: LeastBytes,
}

impl ModelSize {
    fn of(layers: &Layers, options: &TrainOptions) -> Result<Self> {
        let [least, narrow] = [options.dtype(), NumberType::Bf16]
            .map(|dtype| LeastBytes::of(layers, options, dtype.kind()));
        Ok(Self { layers: layers.len(), least: least?, narrow: narrow? })
    }

    /// Lists the options that are not in use yet and should make the model fit a device with this limit.
    fn remedies(self, options: &TrainOptions, limit: Option<Bytes>) -> Vec<String> {
        let Self { layers, least, narrow } = self;
        let offload = options.stages.offload;
        let stages = options.stages.stages;
        let count = stages.unwrap_or(1);
        let fits = |bytes: u64| limit.is_none_or(|limit| bytes <= limit.0 / WITH_ACTIVATIONS);
        let cut =
            |least: LeastBytes, stages: usize| least.of_stage.max(least.resident / stages as u64);
        let is_offloaded = match offload {
            OffloadArgument::All => true,
            OffloadArgument::None => false,
            // `auto` considers offloading if the model takes more than half of the memory.
            OffloadArgument::Auto => {
                limit.is_none_or(|limit| least.resident > limit.0.saturating_mul(count as u64) / 2)
            }
        };
        let needed = |least: LeastBytes| match is_offloaded {
            true => least.offloaded,
            false => cut(least, count),
        };
        let is_wide =
            matches!(options.dtype(), NumberType::F64 | NumberType::F32 | NumberType::Tf32);
        let recomputes = options.stages.recompute == Some(Recompute::Always);
        let mut remedies = vec![match options.memory_limit {
            Some(_) => "raise --memory-limit".to_owned(),
            None => "use a smaller model".to_owned(),
        }];
        if stages.is_some() && !recomputes && fits(needed(least)) {
            remedies.push("recompute activations by --recompute always".to_owned());
        }
        if offload != OffloadArgument::All
            && let Some(more) = (count + 1..=layers).find(|more| fits(cut(least, *more)))
        {
            remedies.push(format!("split the model over {more} devices by --stages {more}"));
        }
        if !is_offloaded && fits(least.offloaded) {
            remedies.push("offload it to the host by --offload all".to_owned());
        }
        if is_wide && fits(needed(narrow)) {
            remedies.push("use --dtype bf16".to_owned());
        }
        remedies
    }
}

/// Joins remedies as `a, b, or c`.
fn listed(remedies: &[String]) -> String {
    match remedies {
        [] => String::new(),
        [only] => only.clone(),
        [others @ .., last] => format!("{}, or {last}", others.join(", ")),
    }
}

/// Returns the error of a model that could not be built, with remedies if memory ran out.
pub(super) fn of_building(
    error: anyhow::Error,
    layers: &Layers,
    options: &TrainOptions,
) -> anyhow::Error {
    if !ran_out(&error) {
        return error;
    }
    let Ok(size) = ModelSize::of(layers, options) else { return error };
    // Nothing has run yet, so no activations are kept for a backward.
    let mut remedies = size.remedies(options, options.memory_limit);
    remedies.retain(|remedy| !remedy.contains("--recompute"));
    does_not_fit(format!("{}: {}", output::causes_alone(&error), listed(&remedies)))
}

impl Trainer {
    /// Returns the error of a test, with a remedy for a non-finite loss.
    pub(super) fn advise_after_test(&self, cause: Error) -> anyhow::Error {
        let (steps, learning_rate) = (self.steps_done(), self.state.rate);
        match cause.non_finite() {
            Some(value) => anyhow::anyhow!(
                "{value} in the test after step {steps}: the weights are broken; lower --learning-rate (it is \
                 {learning_rate:?}), or look at the data"
            ),
            None => self.advise(cause),
        }
    }

    /// Returns the library's error of a step, with a remedy if there is a known one.
    pub(super) fn advise(&self, cause: Error) -> anyhow::Error {
        if let Some(value) = cause.non_finite() {
            return self.of_numbers(&value);
        }
        if let Error::DoesNotFit { available, cause: oom, .. } = &cause {
            let remedy = self.fixed_remedy(oom).unwrap_or_else(|| self.smaller(*available, oom));
            return does_not_fit(format!("{}; {remedy}", oom.message));
        }
        let remedy = |oom: &OutOfMemory| {
            self.remedy(oom).unwrap_or_else(|| listed(&self.remedies(oom.limit)))
        };
        match cause.out_of_memory().map(remedy) {
            Some(remedy) => {
                let told = format!("{}; {remedy}", without_remedy(&cause.to_string()));
                anyhow::Error::from(cause).context(told)
            }
            None => cause.into(),
        }
    }

    /// Returns the bytes of a step that do not depend on the micro-batch size, if they are known.
    fn fixed_bytes(&self) -> Option<FixedBytes> {
        Some(FixedBytes::of(self.engine.store()?, &self.options.recipe.method()))
    }

    /// Lists the options that should make the model fit a device with this limit.
    fn remedies(&self, limit: Option<Bytes>) -> Vec<String> {
        let size = ModelSize::of(&self.layers, &self.options);
        // The layers are built once more for it, which needs memory too.
        size.map_or_else(
            |_| vec!["use a smaller model".to_owned()],
            |size| size.remedies(&self.options, limit),
        )
    }

    /// Says that a single sample does not fit, if `fixed_remedy` cannot tell from the fixed bytes.
    fn smaller(&self, available: Bytes, oom: &OutOfMemory) -> String {
        let least = match self.unit_of_sizes() {
            "tokens" => "the longest sample alone",
            _ => "one sample",
        };
        format!(
            "a micro-batch of {least} does not fit into the {available} of free memory either: {}",
            listed(&self.remedies(oom.limit))
        )
    }

    fn of_numbers(&self, value: &str) -> anyhow::Error {
        let (epoch, step) = (self.state.epoch + 1, self.state.running.steps + 1);
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
        let (fixed, limit) = (self.fixed_bytes()?, oom.limit?);
        let fits_none = fixed.total() > limit.0 || self.most_that_fits(oom) == Some(0);
        fits_none.then(|| {
            let mut remedies = self.remedies(Some(limit));
            remedies.splice(1..1, self.smaller_state(&fixed, limit));
            format!(
                "{fixed} at any micro-batch size, and the limit is {limit}: {}",
                listed(&remedies)
            )
        })
    }

    /// Suggests an optimizer with less state, if the step would then fit.
    fn smaller_state(&self, fixed: &FixedBytes, limit: Bytes) -> Option<String> {
        let is_sgd = self.options.recipe.optimizer == OptimizerName::Sgd;
        // These bytes are exact, so a fifth of the limit is enough to leave for activations.
        let with = |state: u64| fixed.total() - fixed.state + state <= limit.0 / 5 * 4;
        let remedy = match (is_sgd, fixed.state) {
            (_, 0) => return None,
            (false, _) if with(fixed.momentum) => "use --optimizer sgd, which keeps less",
            (false, _) if with(0) => "use --optimizer sgd --momentum 0, which needs no state",
            (true, _) if with(0) => "use --momentum 0, which needs no state",
            _ => return None,
        };
        Some(remedy.to_owned())
    }

    /// Estimates the largest micro-batch that fits, from the bytes that the failed micro-batch needed. The
    /// estimate can be too large, because the failed micro-batch might have needed more bytes later.
    fn most_that_fits(&self, oom: &OutOfMemory) -> Option<usize> {
        let (fixed, limit) = (self.fixed_bytes()?, oom.limit?);
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
