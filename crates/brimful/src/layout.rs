//! The order in memory of a convolutional model's numbers: as the user has them, or channels last.
//!
//! Which is faster depends on the device, the type of the numbers and the shapes, so it is measured,
//! in the first steps: two of each order count, after those that choose kernels.

use std::time::Duration;

use brimful_torch::layout::{laid_out, lay_out};
use tch::Tensor;

use crate::Result;
use crate::batch::{Batch, Leaf};
use crate::oom::catch_unseen;

/// The order of images and convolutions in memory. It changes neither values nor saved models.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Layout {
    /// As the user has them.
    #[default]
    AsIs,
    /// With the channels last, inputs and weights.
    ChannelsLast,
    /// The faster of the two, measured in the first steps.
    Measured,
}

/// Steps of each order that are timed: the faster of 2 counts.
const TIMED_STEPS: usize = 2;
/// After 40 steps a measurement that came to nothing is given up: shapes differ all the time.
const MAX_TRIAL_STEPS: usize = 40;
/// Channels last must be at least 3 % faster to be taken: less is noise.
const MIN_SPEEDUP: f64 = 1.03;

/// The order in use, and what is known of both.
#[derive(Debug, Default)]
pub(crate) struct Arrangement {
    channels_last: bool,
    /// Whether the parameters are still in the other order.
    changed: bool,
    trial: Option<LayoutTrial>,
}

/// A measurement under way: seconds a sample of each order.
#[derive(Debug, Default)]
struct LayoutTrial {
    steps: usize,
    /// Whether this is the order's first step, in which kernels are chosen.
    first: bool,
    as_is: Vec<f64>,
    channels_last: Vec<f64>,
}

/// Who runs steps in an order of memory that may be on trial.
pub(crate) trait InOrder {
    fn arrangement(&mut self) -> &mut Arrangement;

    /// Lays the parameters out in the order that it has now, if steps do not do so as they begin.
    fn lay_out(&mut self) -> Result<()>;

    /// Runs `f`; where that fails in an order of memory that is on trial, again in the user's own. The order is to
    /// blame if that goes well.
    fn in_order<T>(&mut self, mut f: impl FnMut(&mut Self) -> Result<T>) -> Result<T> {
        if !self.arrangement().is_on_trial() {
            return f(self);
        }
        let cause = match catch_unseen(|| f(self)) {
            Ok(done) => return Ok(done),
            Err(cause) => cause,
        };
        self.arrangement().set_channels_last(false);
        self.lay_out()?;
        let done = f(self);
        match done {
            Ok(_) => self.arrangement().refuse(&cause),
            Err(_) => {
                self.arrangement().set_channels_last(true);
                self.lay_out()?;
            }
        }
        done
    }
}

impl Arrangement {
    pub(crate) fn new(layout: Layout) -> Self {
        let trial = LayoutTrial { first: true, ..LayoutTrial::default() };
        let channels_last = layout == Layout::ChannelsLast;
        Self {
            channels_last,
            changed: channels_last,
            trial: (layout == Layout::Measured).then_some(trial),
        }
    }

    /// Whether the order may yet turn out not to work for the user's closure.
    pub(crate) fn is_on_trial(&self) -> bool {
        self.channels_last && self.trial.is_some()
    }

    /// Whether the faster order is being looked for.
    pub(crate) fn is_measured(&self) -> bool {
        self.trial.is_some()
    }

    pub(crate) fn is_channels_last(&self) -> bool {
        self.channels_last
    }

    /// Lays the parameters out; those of a model without convolutions stay as they are for good.
    pub(crate) fn begin(&mut self, parameters: &[Tensor]) -> Result<()> {
        if !parameters.iter().any(has_channels) {
            *self = Self::default();
        }
        if self.changed {
            lay_out_convolutions(parameters.iter(), self.channels_last)?;
            self.changed = false;
        }
        Ok(())
    }

    /// The micro-batch with its images laid out as the convolutions are.
    pub(crate) fn of<B: Batch>(&self, micro_batch: B) -> Result<B> {
        if !self.channels_last {
            return Ok(micro_batch);
        }
        micro_batch.map(&mut |leaf| match leaf {
            Leaf::Cut(tensor) => with_channels_last(tensor),
            leaf => Ok(leaf.tensor().shallow_clone()),
        })
    }

    /// Whether steps are being compared, which must not differ in anything else. The very first is
    /// not.
    pub(crate) fn is_measuring(&self) -> bool {
        self.trial.as_ref().is_some_and(|trial| trial.steps > 0)
    }

    /// Learns from a step; one in which something was new to the device is not timed. Where
    /// the other order was chosen, tells how many times faster it is.
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
            // cuDNN chooses kernels anew for the other order.
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
        // The least, not the mean: whatever disturbs a step makes it slower, never faster.
        let as_is = best(&trial.as_is);
        let last = best(&trial.channels_last);
        self.channels_last = as_is > last * MIN_SPEEDUP;
        self.changed = !self.channels_last;
        tracing::info!(
            channels_last = self.channels_last,
            as_is_samples_per_s = 1.0 / as_is,
            channels_last_samples_per_s = 1.0 / last,
            "the order of images and convolutions in memory is chosen"
        );
        self.channels_last.then_some(as_is / last)
    }

    /// Ends the measurement in favour of the user's own order.
    pub(crate) fn refuse(&mut self, cause: &str) {
        if self.trial.take().is_some() {
            tracing::warn!(cause, "channels stay where they are in memory");
        }
        self.set_channels_last(false);
    }

    fn set_channels_last(&mut self, channels_last: bool) {
        self.changed |= self.channels_last != channels_last;
        self.channels_last = channels_last;
    }
}

/// Lays those of the parameters out that are convolutions'.
pub(crate) fn lay_out_convolutions<'a>(
    parameters: impl Iterator<Item = &'a Tensor>,
    channels_last: bool,
) -> Result<()> {
    let mut convolutions = parameters.filter(|p| has_channels(p)).map(Tensor::shallow_clone);
    Ok(convolutions.try_for_each(|mut p| lay_out(&mut p, channels_last))?)
}

/// Images with their channels last, and anything else as it is.
pub(crate) fn with_channels_last(tensor: &Tensor) -> Result<Tensor> {
    match has_channels(tensor) && tensor.is_floating_point() {
        true => Ok(laid_out(tensor, true)?),
        false => Ok(tensor.shallow_clone()),
    }
}

/// Whether it is as images or a convolution's weights are.
pub(crate) fn has_channels(tensor: &Tensor) -> bool {
    matches!(tensor.dim(), 4 | 5)
}
