//! Measurement of a model's layers, and of the host: its memory and the host link.

use anyhow::Result;
use brimful::balance::{self, Profile};
use brimful::internal::{free_host_bytes, measure_host_link, sums_apart};
use brimful::plan::Request;
use brimful::{Bytes, device};
use brimful_models::pretrained::Pretrained;
use brimful_plan::schedule::HostLinkCost;
use tch::Kind;

use super::options::MeasuredModel;
use crate::commands::train::{GradientDtype, Recipe};
use crate::data::{self, Sample, Synthetic};
use crate::exit::ensure_use;
use crate::model::unopened;
use crate::progress::begin_measuring;
use crate::setting::{DROPOUT, ModelSource, SEQUENCE, typed};

/// Number of samples measured together: enough to separate the time of a sample from the overhead of a call.
const SAMPLES: usize = 16;

impl MeasuredModel {
    /// Measures times and sizes of the model's layers on the device. If the samples are text, also returns the
    /// number of tokens per sample.
    pub(super) fn measure(&self, model: &ModelSource) -> Result<(Profile, Option<u64>)> {
        let device = device::find(&self.device)?;
        self.dtype.prepare(device)?;
        let (layers, sample) = match model {
            ModelSource::Named(name) => {
                let sample = name.synthetic_sample();
                (name.layers(&sample, DROPOUT)?, sample)
            }
            ModelSource::Folder(folder) => {
                let described = Pretrained::without_weights(folder);
                let described = described.map_err(|error| unopened(folder, &error))?;
                let config = described.config();
                let length = SEQUENCE.min(config.context());
                (config.layers(), Sample::Sequence { length, vocabulary: config.vocabulary() })
            }
        };
        let tokens_per_sample = match sample {
            Sample::Sequence { length, .. } => Some(length as u64),
            _ => None,
        };
        let made_up = Synthetic { sample, train: SAMPLES, test: 1, seed: 0 };
        let batch = data::synthetic(&made_up)?.train.all()?.inputs;
        let (inputs, advance) = (typed(&batch, self.kind()), begin_measuring(layers.len(), device));
        let profile = balance::measure_of_kind(&layers, device, &inputs, self.kind(), advance)?;
        Ok((profile, tokens_per_sample))
    }

    /// Returns the dtype of parameters and activations.
    pub(super) fn kind(&self) -> Kind {
        self.dtype.kind()
    }

    /// Returns the bytes of optimizer state for each byte of parameters.
    pub(super) fn optimizer_bytes(&self) -> Result<f64> {
        let Some(name) = self.optimizer else { return Ok(self.optimizer_bytes) };
        let recipe = Recipe::usual(name, self.optimizer_state);
        recipe.check()?;
        Ok(recipe.method().state_factor_in(self.kind()))
    }

    /// Returns the bytes of offloaded gradients for each byte of parameters, if their dtype is not the dtype of
    /// the sums.
    pub(super) fn sent_gradient_bytes(&self) -> Result<Option<f64>> {
        self.offload_gradients.check(self.dtype)?;
        Ok((self.offload_gradients == GradientDtype::Bf16).then_some(1.0))
    }

    /// Returns whether the sums of gradients are separate tensors, beside the gradients of each micro-batch. A
    /// profile does not tell, so for a profile the answer is true.
    pub(super) fn sums_apart(&self) -> Result<bool> {
        match self.model {
            Some(_) => Ok(sums_apart(device::find(&self.device)?, self.kind())),
            None => Ok(true),
        }
    }
}

impl MeasuredModel {
    /// Allows offloading of stages that fit on no device, if the host's memory is known.
    pub(super) fn host(&self, request: &mut Request<'_>) -> Result<()> {
        let is_measured = self.model.is_some();
        request.host_memory = match self.host_memory {
            Some(memory) => Some(memory.0),
            None if is_measured => Some(free_host_bytes()?),
            None => None,
        };
        if is_measured {
            request.host_link = measure_host_link(device::find(&self.device)?)?;
        }
        match self.given_host_link()? {
            Some(host_link) => request.host_link = host_link,
            None => ensure_use!(
                is_measured || request.host_memory.is_none(),
                "--host-memory with --profile needs --host-link too"
            ),
        }
        Ok(())
    }

    fn given_host_link(&self) -> Result<Option<HostLinkCost>> {
        ensure_use!(
            self.host_link.len() <= 2 && !self.host_link.contains(&Bytes(0)),
            "--host-link has a rate above 0 to the device, and one back where that differs"
        );
        let rates: Vec<_> = self.host_link.iter().map(|rate| rate.0 as f64).collect();
        let Some((&inward, back)) = rates.split_first() else { return Ok(None) };
        let outward = back.first().copied().unwrap_or(inward);
        Ok(Some(HostLinkCost { inward, outward, both: inward.min(outward) }))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use crate::args::{BrimfulArgs, BrimfulCommand};

    #[test]
    fn sums_of_a_model_on_a_cpu_are_its_gradients_and_those_of_a_profile_may_be_apart() {
        let sums_apart = |words: &str| {
            let words = BrimfulArgs::try_parse_from(words.split(' ')).expect("flags of a plan");
            let BrimfulCommand::Plan(plan) = words.command else { panic!("no plan: {words:?}") };
            plan.measured.sums_apart().expect("a device that is here")
        };
        assert!(!sums_apart("brimful plan --model mlp --batch-size 8 --stages 2"));
        assert!(sums_apart("brimful plan --profile model.toml --batch-size 8 --stages 2"));
    }
}
