//! Default settings for fine-tuning a folder's weights, and the reason for each.

use tch::Kind;

use super::options::BatchSize;
use super::recipe::TunedWeights;
use super::{TrainOptions, Trainer};
use crate::data::Sample;
use crate::model::Model;
use crate::setting::NumberType;

/// Default limit on the tokens of a mini-batch, with every sample counted at its greatest length.
const BATCH_TOKENS: i64 = 16_384;

/// Defaults of a fine-tuning; none for a training from scratch.
#[derive(Debug)]
pub(super) struct UsualSettings(Option<Tuning>);

#[derive(Debug)]
struct Tuning {
    /// The options as given.
    said: Box<TrainOptions>,
    weights: TunedWeights,
    /// Dtype of the weights in their files.
    stored: Kind,
}

impl UsualSettings {
    /// Returns the defaults for training this model.
    pub(super) fn of(model: &Model, options: &TrainOptions) -> Self {
        let weights = match options.fine_tune.trains_adapter() {
            true => TunedWeights::Lora,
            false => TunedWeights::All,
        };
        let tuning = |stored| Tuning { said: Box::new(options.clone()), weights, stored };
        Self(model.folder().and_then(|folder| folder.stored_kind()).map(tuning))
    }

    /// Fills in the options that were not given, for samples like `sample`.
    pub(super) fn fill_in(&self, options: &TrainOptions, sample: &Sample) -> TrainOptions {
        let mut options = options.clone();
        let (Some(tuning), Sample::Sequence { length, .. }) = (&self.0, sample) else {
            return options;
        };
        options.recipe.tunes = Some(tuning.weights);
        options.length.tunes = true;
        options.dtype.get_or_insert(tuning.dtype());
        let samples = usize::try_from((BATCH_TOKENS / length).max(1)).unwrap_or(1);
        options.batch_size.get_or_insert(BatchSize::Samples(samples));
        options.sequence = options.sequence.or(usize::try_from(*length).ok());
        options
    }

    /// Describes each setting in a line, with its source.
    pub(super) fn lines(&self, trainer: &Trainer) -> Vec<String> {
        let Some(Tuning { said, weights, stored }) = &self.0 else { return Vec::new() };
        let TrainOptions { recipe, length, files, .. } = &trainer.options;
        let steps = length.steps(trainer.steps());
        let weights = match weights {
            TunedWeights::Lora => "default for LoRA",
            TunedWeights::All => "default for fine-tuning",
        };
        let rate = if files.resume.is_some() { "of the resumed run" } else { weights };
        let (ends, ends_said) = match length.max_steps {
            Some(steps) => (("--max-steps", steps), true),
            None => (("--epochs", length.epochs(trainer.steps())), said.length.epochs.is_some()),
        };
        let settings = [
            (
                "--learning-rate",
                trainer.state.rate.to_string(),
                said.recipe.learning_rate.is_some(),
                rate,
            ),
            (
                "--warmup",
                recipe.warmup(steps).to_string(),
                said.recipe.warmup.is_some(),
                "3 % of all steps",
            ),
            (ends.0, ends.1.to_string(), ends_said, weights),
            (
                "--sequence",
                trainer.options.sequence.unwrap_or_default().to_string(),
                said.sequence.is_some(),
                "tokens, at most 2048, the model's or the text's",
            ),
            (
                "--batch-size",
                trainer.options.batch_size().to_string(),
                said.batch_size.is_some(),
                "samples, at most 16384 tokens together",
            ),
            (
                "--dtype",
                trainer.options.dtype().to_string(),
                said.dtype.is_some(),
                stored_as(*stored),
            ),
        ];
        let line = |(flag, value, is_said, usual): (&str, String, bool, &str)| {
            format!("  {flag:<16} {value:<8} {}", if is_said { "given" } else { usual })
        };
        settings.into_iter().map(line).collect()
    }
}

impl Tuning {
    fn dtype(&self) -> NumberType {
        NumberType::holding(self.stored)
    }
}

/// Returns the reason for the dtype of a training from weights stored in this dtype.
fn stored_as(kind: Kind) -> &'static str {
    match kind {
        Kind::Half => "the weights are stored in f16, which cannot be trained",
        _ => "dtype of the stored weights",
    }
}
