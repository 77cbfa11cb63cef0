//! Updates of the parameters: the optimizer, its learning rate, and changes to gradients and weights. Also the
//! default settings for fine-tuning a folder's weights, each with its reason.

use anyhow::Result;
use brimful::optim::{Adafactor, Adam, AdamW, Method, Muon, RateCurve, Sgd, StateFormat};
use clap::{Args, ValueEnum};
use tch::Kind;

use super::options::BatchSize;
use super::{TrainOptions, Trainer};
use crate::data::Sample;
use crate::exit::ensure_use;
use crate::model::Model;
use crate::setting::{NumberType, shown_as_given, words};

/// Optimizer, and changes to gradients and weights.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Optimizer")]
pub struct Recipe {
    /// Optimizer: sgd, adam, adamw, adafactor or muon
    #[arg(long, value_enum, default_value = "adamw", value_name = "NAME")]
    #[arg(hide_possible_values = true)]
    pub(crate) optimizer: OptimizerName,
    /// Dtype of the optimizer's averages (moments) [default: f32]
    #[arg(long, value_enum, value_name = "FORMAT", hide_short_help = true)]
    pub(crate) optimizer_state: Option<OptimizerState>,
    /// Learning rate [default: 1e-3; SGD 0.05; fine-tuning 2e-5; LoRA 2e-4]
    ///
    /// The default of SGD is always 0.05. That of Adafactor is 0.01, unless it fine-tunes
    #[arg(long, visible_alias = "lr", value_name = "RATE", allow_negative_numbers = true)]
    pub(crate) learning_rate: Option<f64>,
    #[arg(long, value_enum, default_value = "none", value_name = "C")]
    #[arg(help = words::LEARNING_RATE_DECAY, hide_possible_values = true)]
    pub(crate) learning_rate_decay: Decay,
    /// Linear warm-up of the learning rate [default: 0; fine-tuning 3 %]
    ///
    /// When fine-tuning, the default is 3 % of all steps
    #[arg(long, value_name = "STEPS", value_parser = words::count_or_none)]
    pub(crate) warmup: Option<usize>,
    /// Weight decay of matrices [default: AdamW 0.01, Muon 0.1]
    ///
    /// Biases and norms have none. The default of the other optimizers is 0
    #[arg(long, value_name = "W", allow_negative_numbers = true)]
    pub(crate) weight_decay: Option<f64>,
    /// SGD momentum [default: 0.9]
    #[arg(long, value_name = "M", allow_negative_numbers = true, hide_short_help = true)]
    pub(crate) momentum: Option<f64>,
    /// Clip the gradient to this L2 norm
    #[arg(long, value_name = "NORM", allow_negative_numbers = true)]
    pub(crate) clip_norm: Option<f64>,
    /// Exponential moving average of the weights, with this decay per step
    ///
    /// For example 0.999. Evaluation, predict and the best checkpoint (--keep best) use the averaged weights
    #[arg(long, value_name = "DECAY", allow_negative_numbers = true, hide_short_help = true)]
    pub(crate) ema: Option<f64>,
    /// Gradient accumulation: mini-batches per step
    #[arg(long, value_name = "N", value_parser = words::count, default_value_t = 1)]
    #[arg(hide_short_help = true)]
    pub(crate) accumulate: usize,
    /// Pretrained weights that are fine-tuned, for which learning rates are lower.
    #[arg(skip)]
    pub(super) tunes: Option<TunedWeights>,
}

/// Part of a folder's weights that is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TunedWeights {
    All,
    Lora,
}

/// Number of all steps of a fine-tuning for each step of its default warm-up.
const STEPS_PER_WARMUP: usize = 33;

impl Recipe {
    /// Returns the recipe with this optimizer, and with defaults for all other options.
    pub(crate) fn usual(optimizer: OptimizerName, state: Option<OptimizerState>) -> Self {
        Self {
            optimizer,
            optimizer_state: state,
            learning_rate: None,
            learning_rate_decay: Decay::None,
            warmup: None,
            weight_decay: None,
            momentum: None,
            clip_norm: None,
            ema: None,
            accumulate: 1,
            tunes: None,
        }
    }

    /// Refuses numbers that no optimizer accepts.
    pub(crate) fn check(&self) -> Result<()> {
        let from_0 = [
            ("learning-rate", self.learning_rate),
            ("weight-decay", self.weight_decay),
            ("momentum", self.momentum),
        ];
        for (flag, number) in from_0 {
            let is_right = number.is_none_or(|number| number.is_finite() && number >= 0.0);
            let shown = number.unwrap_or_default();
            ensure_use!(is_right, "--{flag} {shown}: give a number from 0 on");
        }
        let momentum = self.momentum.unwrap_or_default();
        ensure_use!(
            momentum.total_cmp(&1.0).is_lt(),
            "--momentum {momentum}: give a number from 0 to below 1, such as 0.9"
        );
        if let Some(length) = self.clip_norm {
            ensure_use!(
                length.is_finite() && length > 0.0,
                "--clip-norm {length}: give a number above 0"
            );
        }
        if let Some(factor) = self.ema {
            ensure_use!(
                (0.0..1.0).contains(&factor),
                "--ema {factor}: give a number from 0 to below 1, such as 0.999"
            );
        }
        ensure_use!(
            self.momentum.is_none() || self.optimizer == OptimizerName::Sgd,
            "--momentum is for --optimizer sgd: the others have moments of their own"
        );
        let format = self.optimizer_state.unwrap_or(OptimizerState::F32);
        ensure_use!(
            self.optimizer != OptimizerName::Adafactor || format == OptimizerState::F32,
            "--optimizer-state {format}: --optimizer adafactor keeps rows and columns alone, in f32: leave \
             --optimizer-state out, or choose another optimizer"
        );
        Ok(())
    }

    /// Returns the optimizer and its settings. Engines apply the weight decay to matrices only.
    pub(crate) fn method(&self) -> Method {
        let rate = |default| self.learning_rate.unwrap_or(default);
        let of_adam = match self.tunes {
            None => 1e-3,
            Some(TunedWeights::All) => 2e-5,
            Some(TunedWeights::Lora) => 2e-4,
        };
        let decay = |default| self.weight_decay.unwrap_or(default);
        let format = self.optimizer_state.map_or(StateFormat::F32, OptimizerState::format);
        match self.optimizer {
            OptimizerName::Sgd => Sgd::new(rate(0.05))
                .momentum(self.momentum.unwrap_or(0.9))
                .weight_decay(decay(0.0))
                .state_format(format)
                .into(),
            OptimizerName::Adam => {
                Adam::new(rate(of_adam)).weight_decay(decay(0.0)).state_format(format).into()
            }
            OptimizerName::Adamw => {
                AdamW::new(rate(of_adam)).weight_decay(decay(0.01)).state_format(format).into()
            }
            OptimizerName::Adafactor => {
                let usual = self.tunes.map_or(1e-2, |_| of_adam);
                Adafactor::new(rate(usual)).weight_decay(decay(0.0)).into()
            }
            // Muon's steps are scaled to the size of AdamW's, so both have the same default learning rate.
            OptimizerName::Muon => Muon::new(rate(of_adam))
                .match_rms_adamw(true)
                .weight_decay(decay(0.1))
                .state_format(format)
                .into(),
        }
    }

    /// Returns the number of warm-up steps of a training with `steps` steps.
    pub(super) fn warmup(&self, steps: usize) -> usize {
        let usual = self.tunes.map_or(0, |_| steps.div_ceil(STEPS_PER_WARMUP));
        self.warmup.unwrap_or(usual)
    }

    /// Refuses a warm-up that is longer than the training.
    pub(super) fn check_warmup(&self, steps: usize) -> Result<()> {
        let warmup = self.warmup(steps);
        ensure_use!(
            warmup <= steps,
            "--warmup {warmup}: the training has only {steps} steps: give {steps} at most"
        );
        Ok(())
    }

    /// Returns the learning rate schedule over `steps` steps, with its peak at `rate`.
    pub(super) fn curve(&self, rate: f64, steps: usize) -> RateCurve {
        let curve = RateCurve::new(rate).warmup(self.warmup(steps));
        match self.learning_rate_decay {
            Decay::None => curve,
            Decay::Linear => curve.linear(steps),
            Decay::Cosine => curve.cosine(steps),
        }
    }
}

/// Optimizer by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OptimizerName {
    /// Stochastic gradient descent, with momentum
    Sgd,
    Adam,
    Adamw,
    /// Averages of squared gradients by rows and columns alone; rates relative to the weights' size
    Adafactor,
    /// Orthogonalized momentum of matrices; AdamW for the others
    Muon,
}

shown_as_given!(OptimizerName);

/// Dtype of an optimizer's averages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OptimizerState {
    F32,
    /// Stochastic rounding
    Bf16,
    /// In groups of 128 numbers with a common scale, and stochastic rounding
    #[value(name = "8bit")]
    EightBit,
}

shown_as_given!(OptimizerState);

impl OptimizerState {
    /// Returns the library's state format.
    pub fn format(self) -> StateFormat {
        match self {
            Self::F32 => StateFormat::F32,
            Self::Bf16 => StateFormat::Bf16,
            Self::EightBit => StateFormat::EightBit,
        }
    }
}

/// Decay of the learning rate to 0 over the whole training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Decay {
    /// Constant learning rate
    None,
    /// Linear decay
    Linear,
    /// Cosine decay
    Cosine,
}

shown_as_given!(Decay);

/// Default limit on the tokens of a mini-batch, with every sample counted at its greatest length.
const BATCH_TOKENS: i64 = 16_384;

/// Default settings of a fine-tuning, or none for a training from scratch.
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

/// Returns the reason for the default dtype of a fine-tuning, by the dtype of the stored weights.
fn stored_as(kind: Kind) -> &'static str {
    match kind {
        Kind::Half => "the weights are stored in f16, which cannot be trained",
        _ => "dtype of the stored weights",
    }
}
