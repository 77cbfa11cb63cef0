//! Memory format of convolutional models: as the user has it, or channels last.
//!
//! The faster format depends on the device, the dtype and the shapes, so both formats are measured in the first
//! steps. In each format, the first step chooses kernels, and two more steps are timed.

use std::time::Duration;

use brimful_torch::memory_format::{set_memory_format, to_memory_format};
use tch::Tensor;

use crate::batch::{Batch, Leaf};
use crate::{Error, Result};

/// Memory format of images and convolutions. It changes neither values nor saved models.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum MemoryFormat {
    /// The user's own format.
    #[default]
    AsIs,
    /// Channels last, for inputs and weights.
    ChannelsLast,
    /// The faster of the two, measured in the first steps.
    Measured,
}

/// Number of timed steps in each format; the fastest counts.
const TIMED_STEPS: usize = 2;
/// Number of steps after which an unfinished measurement ends. It is still unfinished if shapes differ from step
/// to step.
const MAX_TRIAL_STEPS: usize = 40;
/// Smallest speedup for which channels last is chosen: a smaller one may be noise.
const MIN_SPEEDUP: f64 = 1.03;

/// Memory format in use, and the measurement that compares the two formats.
#[derive(Debug, Default)]
pub(crate) struct FormatChoice {
    channels_last: bool,
    /// True if the format has changed and the parameters are not converted yet.
    changed: bool,
    trial: Option<FormatTrial>,
    /// Error of a step in the format on trial, while the step runs again in the user's own.
    failed: Option<String>,
}

/// A running measurement: seconds per sample in each format.
#[derive(Debug, Default)]
struct FormatTrial {
    steps: usize,
    /// True if this is the format's first step, in which kernels are chosen.
    first: bool,
    as_is: Vec<f64>,
    channels_last: Vec<f64>,
}

impl FormatChoice {
    /// Returns the choice for this setting; `None` for the user's own format.
    pub(crate) fn wanted(memory_format: MemoryFormat) -> Option<Self> {
        let trial = FormatTrial { first: true, ..FormatTrial::default() };
        let channels_last = memory_format == MemoryFormat::ChannelsLast;
        (memory_format != MemoryFormat::AsIs).then(|| Self {
            channels_last,
            changed: channels_last,
            trial: (memory_format == MemoryFormat::Measured).then_some(trial),
            failed: None,
        })
    }

    /// Returns whether the memory format is still on trial, so that the user's closure may fail in it.
    pub(crate) fn is_on_trial(&self) -> bool {
        self.channels_last && self.trial.is_some()
    }

    /// Returns whether the two memory formats are still being compared.
    pub(crate) fn is_measured(&self) -> bool {
        self.trial.is_some()
    }

    pub(crate) fn is_channels_last(&self) -> bool {
        self.channels_last
    }

    /// Converts the parameters to the memory format; a model without convolutions keeps its own format for good.
    pub(crate) fn begin(&mut self, parameters: &[Tensor]) -> Result<()> {
        if !parameters.iter().any(has_channels) {
            *self = Self::default();
        }
        if self.changed {
            convert_convolutions(parameters.iter(), self.channels_last)?;
            self.changed = false;
        }
        Ok(())
    }

    /// Converts the images of a micro-batch to the memory format of the convolutions.
    pub(crate) fn of<B: Batch>(&self, micro_batch: B) -> Result<B> {
        if !self.channels_last {
            return Ok(micro_batch);
        }
        micro_batch.map(&mut |leaf| match leaf {
            Leaf::Cut(tensor) => with_channels_last(tensor),
            leaf => Ok(leaf.tensor().shallow_clone()),
        })
    }

    /// Returns whether steps are being compared, so that they must differ in nothing but the format. The very
    /// first step does not count.
    pub(crate) fn is_measuring(&self) -> bool {
        self.trial.as_ref().is_some_and(|trial| trial.steps > 0)
    }

    /// Learns from a step; a step with a new capture is not timed. If channels last has been chosen, returns
    /// its speedup.
    pub(crate) fn observe(&mut self, samples: usize, time: Duration, new: bool) -> Option<f64> {
        let trial = self.trial.as_mut()?;
        trial.steps += 1;
        let untimed = std::mem::take(&mut trial.first) || new;
        let times = if self.channels_last { &mut trial.channels_last } else { &mut trial.as_is };
        if !untimed {
            times.push(time.as_secs_f64() / samples as f64);
        }
        if times.len() == TIMED_STEPS {
            if self.channels_last {
                return self.decide();
            }
            // cuDNN chooses kernels anew for the other format.
            trial.first = true;
            self.set_channels_last(true);
        } else if trial.steps >= MAX_TRIAL_STEPS {
            self.refuse("shapes that differ from step to step");
        }
        None
    }

    fn decide(&mut self) -> Option<f64> {
        let trial = self.trial.take()?;
        let best = |times: &[f64]| times.iter().copied().fold(f64::INFINITY, f64::min);
        // The minimum, not the mean: a disturbance makes a step slower, never faster.
        let as_is = best(&trial.as_is);
        let last = best(&trial.channels_last);
        self.channels_last = as_is > last * MIN_SPEEDUP;
        self.changed = !self.channels_last;
        tracing::info!(
            channels_last = self.channels_last,
            as_is_samples_per_s = 1.0 / as_is,
            channels_last_samples_per_s = 1.0 / last,
            "the memory format of images and convolutions is chosen"
        );
        self.channels_last.then_some(as_is / last)
    }

    /// Falls back to the user's own format after this error, if channels last is on trial. Returns whether it
    /// falls back.
    pub(crate) fn fall_back(&mut self, error: &Error) -> bool {
        let is_on_trial = self.is_on_trial();
        if is_on_trial {
            self.failed = Some(error.to_string());
            self.set_channels_last(false);
        }
        is_on_trial
    }

    /// Ends the fallback. If the step works in the user's own format, channels last was the cause and is refused.
    /// If the step fails again, the trial of channels last goes on.
    pub(crate) fn end_fallback(&mut self, works: bool) {
        match (self.failed.take(), works) {
            (Some(cause), true) => self.refuse(&cause),
            (Some(_), false) => self.set_channels_last(true),
            (None, _) => {}
        }
    }

    /// Ends the measurement in favour of the user's own format.
    fn refuse(&mut self, cause: &str) {
        if self.trial.take().is_some() {
            tracing::warn!(cause, "images and convolutions keep their memory format");
        }
        self.set_channels_last(false);
    }

    fn set_channels_last(&mut self, channels_last: bool) {
        self.changed |= self.channels_last != channels_last;
        self.channels_last = channels_last;
    }
}

/// Converts the convolutions' parameters to a memory format.
pub(crate) fn convert_convolutions<'a>(
    parameters: impl Iterator<Item = &'a Tensor>,
    channels_last: bool,
) -> Result<()> {
    let mut convolutions = parameters.filter(|p| has_channels(p)).map(Tensor::shallow_clone);
    Ok(convolutions.try_for_each(|mut p| set_memory_format(&mut p, channels_last))?)
}

/// Converts images to channels last; leaves other tensors as they are.
pub(crate) fn with_channels_last(tensor: &Tensor) -> Result<Tensor> {
    match has_channels(tensor) && tensor.is_floating_point() {
        true => Ok(to_memory_format(tensor, true)?),
        false => Ok(tensor.shallow_clone()),
    }
}

/// Returns whether the tensor has the dimensions of images or of a convolution's weight.
pub(crate) fn has_channels(tensor: &Tensor) -> bool {
    matches!(tensor.dim(), 4 | 5)
}
