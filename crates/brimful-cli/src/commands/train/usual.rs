//! Settings that were not said of a training that tunes a folder's weights, and where each is from.

use tch::Kind;

use super::options::BatchSize;
use super::recipe::TunedWeights;
use super::trained_model::TrainedModel;
use super::{TrainOptions, Trainer};
use crate::data::Sample;
use crate::setting::NumberType;

/// Tokens of a mini-batch.
const BATCH_TOKENS: i64 = 16_384;

/// What a training that tunes weights takes where nothing is said; nothing of one that begins anew.
#[derive(Debug)]
pub(super) struct UsualSettings(Option<Tuning>);

#[derive(Debug)]
struct Tuning {
    /// As they were given.
    said: Box<TrainOptions>,
    weights: TunedWeights,
    /// The dtype of the weights in their files.
    stored: Kind,
}

impl UsualSettings {
    /// Those of a training of this model.
    pub(super) fn of(model: &TrainedModel, options: &TrainOptions) -> Self {
        let weights = match options.fine_tune.trains_adapter() {
            true => TunedWeights::Lora,
            false => TunedWeights::All,
        };
        let tuning = |stored| Tuning { said: Box::new(options.clone()), weights, stored };
        Self(model.folder().and_then(|folder| folder.stored_kind()).map(tuning))
    }

    /// The options with what was not said of a training on such samples.
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

    /// A line for each setting, with where it is from.
    pub(super) fn lines(&self, trainer: &Trainer) -> Vec<String> {
        let Some(Tuning { said, weights, stored }) = &self.0 else { return Vec::new() };
        let TrainOptions { recipe, length, files, .. } = &trainer.options;
        let steps = length.steps(trainer.steps());
        let weights = match weights {
            TunedWeights::Lora => "usual for LoRA",
            TunedWeights::All => "usual for a folder's weights",
        };
        let rate = if files.resume.is_some() { "that of the run so far" } else { weights };
        let (ends, ends_said) = match length.max_steps {
            Some(steps) => (("--max-steps", steps), true),
            None => (("--epochs", length.epochs(trainer.steps())), said.length.epochs.is_some()),
        };
        let settings = [
            (
                "--learning-rate",
                trainer.rate.to_string(),
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
                "tokens, up to 2048 of what model and text have",
            ),
            (
                "--batch-size",
                trainer.options.batch_size().to_string(),
                said.batch_size.is_some(),
                "16384 tokens",
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

/// Why weights that are stored so are trained in their number type.
fn stored_as(kind: Kind) -> &'static str {
    match kind {
        Kind::Half => "the weights are stored in f16, which is not trained in",
        _ => "as the weights are stored",
    }
}
