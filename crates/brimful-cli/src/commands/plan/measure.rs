//! Measurement of a model's layers.

use anyhow::Result;
use brimful::balance::Profile;
use brimful::device;
use brimful::internal::sums_apart;
use brimful_models::pretrained::Pretrained;
use tch::Kind;

use super::options::MeasuredModel;
use crate::commands::train::{GradientDtype, Recipe};
use crate::data::{self, Sample, Synthetic};
use crate::fine_tune::unopened;
use crate::measured;
use crate::setting::{DROPOUT, ModelSource, SEQUENCE, typed};

/// Samples measured together: enough to separate the time of a sample from that of a call.
const SAMPLES: usize = 16;

impl MeasuredModel {
    /// Measures times and sizes of the model's layers on the device. Returns also the tokens of a sample of text.
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
        let profile = measured::profile(&layers, device, &typed(&batch, self.kind()), self.kind())?;
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

    /// Returns the bytes of offloaded gradients for each byte of parameters, if their dtype differs from that of the
    /// sums.
    pub(super) fn sent_gradient_bytes(&self) -> Result<Option<f64>> {
        self.offload_gradients.check(self.dtype)?;
        Ok((self.offload_gradients == GradientDtype::Bf16).then_some(1.0))
    }

    /// Returns whether gradients are summed in tensors apart from each micro-batch's own gradients. A profile does not
    /// say so, and counts as true.
    pub(super) fn sums_apart(&self) -> Result<bool> {
        match self.model {
            Some(_) => Ok(sums_apart(device::find(&self.device)?, self.kind())),
            None => Ok(true),
        }
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
