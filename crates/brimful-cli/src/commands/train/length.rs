//! Length of a training, and how often it tests.

use clap::Args;

use crate::setting::words;

/// Default number of epochs.
const EPOCHS: usize = 10;
/// Default number of epochs for fine-tuning pretrained weights.
const TUNING_EPOCHS: usize = 3;

/// Length of a training, and how often it tests.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Optimizer")]
pub struct Length {
    #[arg(long, value_name = "N", value_parser = words::count_or_none)]
    #[arg(help = format!("{} [default: 10; when fine-tuning, 3]", words::EPOCHS))]
    pub(crate) epochs: Option<usize>,
    /// Number of steps, in place of --epochs
    #[arg(long, value_name = "STEPS", value_parser = words::count, conflicts_with = "epochs")]
    pub(crate) max_steps: Option<usize>,
    /// Evaluate every N steps, as well as after each epoch
    #[arg(long, value_name = "N", value_parser = words::count, hide_short_help = true)]
    pub(crate) eval_every: Option<usize>,
    /// Stop early after N evaluations in a row without a new lowest loss
    #[arg(long, value_name = "N", value_parser = words::count, hide_short_help = true)]
    pub(crate) stop_after: Option<usize>,
    /// True if pretrained weights are fine-tuned.
    #[arg(skip)]
    pub(super) tunes: bool,
}

impl Length {
    /// Returns the total number of steps, for epochs of `in_epoch` steps.
    pub(super) fn steps(&self, in_epoch: usize) -> usize {
        let usual = if self.tunes { TUNING_EPOCHS } else { EPOCHS };
        self.max_steps.unwrap_or_else(|| self.epochs.unwrap_or(usual).saturating_mul(in_epoch))
    }

    /// Returns the number of epochs of `in_epoch` steps; the last may be incomplete.
    pub(super) fn epochs(&self, in_epoch: usize) -> usize {
        self.steps(in_epoch).div_ceil(in_epoch.max(1))
    }
}

/// Returns whether `steps` is a multiple of `every`, if that is given.
pub(super) fn is_due(every: Option<usize>, steps: usize) -> bool {
    every.is_some_and(|every| steps.is_multiple_of(every))
}
