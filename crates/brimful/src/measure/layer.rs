//! Measures the times and bytes of one layer.

use brimful_torch::split_backward::SplitBackward;
use tch::Tensor;

use super::meter::Meter;
use crate::batch::tensor_bytes;
use crate::layers::{LayersError, Model, Stashed};
use crate::oom::{self, Caught};
use crate::{Error, Result};

/// Each layer is run at least 5 times, after a warm-up run, until 3 runs agree with the fastest, and at
/// most 25 times.
const LEAST_RUNS: usize = 5;
const AGREEING_RUNS: usize = 3;
const MOST_RUNS: usize = 25;
/// A run agrees with the fastest if it took at most 1.1 times as long.
const AGREEMENT: f64 = 1.1;

/// Times of one call, in seconds.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct LayerTimes {
    pub(super) forward: f64,
    pub(super) backward: f64,
    /// Input gradient of a split backward.
    pub(super) input_gradient: f64,
    /// Weight gradient of a split backward.
    pub(super) weight_gradient: f64,
}

/// Peak bytes in use while a layer computes.
#[derive(Debug, Clone, Copy)]
pub(super) struct LayerPeaks {
    pub(super) forward: u64,
    pub(super) backward: u64,
}

/// Forward whose backward is still to run.
struct TracedForward {
    /// Input and popped skips that require a gradient.
    inputs: Vec<Tensor>,
    output: Vec<Tensor>,
    seconds: f64,
}

/// Layer under measurement.
pub(super) struct MeasuredLayer<'a> {
    pub(super) meter: &'a Meter,
    /// Number of samples in the batch.
    pub(super) samples: i64,
    pub(super) name: &'a str,
    pub(super) model: &'a Model,
    pub(super) parameters: Vec<Tensor>,
    /// Tensors stashed by earlier layers.
    pub(super) stashed: Stashed,
    pub(super) is_first: bool,
}

impl MeasuredLayer<'_> {
    /// Returns the shortest times with all samples, or with the first `few`: other work on the machine only
    /// lengthens times, and not those of all layers alike.
    pub(super) fn times(&self, input: &[Tensor], few: Option<i64>) -> Result<LayerTimes> {
        self.run(input, few)?; // warm-up: libraries initialise, caches fill
        let mut runs = Vec::new();
        while runs.len() < LEAST_RUNS || !agree(&runs) && runs.len() < MOST_RUNS {
            runs.push(self.run(input, few)?);
        }
        Ok(LayerTimes {
            forward: least(&runs, |run| run.forward),
            backward: least(&runs, |run| run.backward),
            input_gradient: least(&runs, |run| run.input_gradient),
            weight_gradient: least(&runs, |run| run.weight_gradient),
        })
    }

    /// Returns the times with a quarter of the samples; `None` if that is fewer than two samples, or the tensors
    /// cannot be cut.
    pub(super) fn part_times(&self, input: &[Tensor]) -> Result<Option<(i64, LayerTimes)>> {
        let few = self.samples / 4;
        // Only tensors with a row for each sample can be cut.
        let rows = |value: &Tensor| value.size().first() == Some(&self.samples);
        if few < 2 || !input.iter().chain(self.stashed.all()).all(rows) {
            return Ok(None);
        }
        Ok(Some((few, self.times(input, Some(few))?)))
    }

    /// Runs the layer twice: with a whole backward, and with a split one.
    fn run(&self, input: &[Tensor], few: Option<i64>) -> Result<LayerTimes> {
        let once = self.traced(input, few)?;
        let all: Vec<Tensor> =
            self.parameters.iter().chain(&once.inputs).map(Tensor::shallow_clone).collect();
        let forward = once.seconds;
        // Without inputs the weight gradient is the whole backward.
        let (_, backward) = self.split_backward(once.output, &[], &all)?;
        let again = self.traced(input, few)?;
        let forward = forward.min(again.seconds);
        let (input_gradient, weight_gradient) = match again.inputs.as_slice() {
            [] => (0.0, backward),
            inputs => self.split_backward(again.output, inputs, &self.parameters)?,
        };
        Ok(LayerTimes { forward, backward, input_gradient, weight_gradient })
    }

    fn traced(&self, input: &[Tensor], few: Option<i64>) -> Result<TracedForward> {
        let input = self.leaves(input, few)?;
        let mut stashed = self.stashed.map(|values| self.leaves(values, few))?;
        let leaves = input.iter().chain(stashed.all()).filter(|leaf| leaf.requires_grad());
        let inputs = leaves.map(Tensor::shallow_clone).collect();
        let (output, seconds) = self.meter.timed(|| self.forward(input, &mut stashed))?;
        Ok(TracedForward { inputs, output, seconds })
    }

    /// Returns the bytes that the forward leaves in use, its output, and the tensors stashed for later
    /// layers.
    pub(super) fn kept(&self, input: &[Tensor]) -> Result<(u64, Vec<Tensor>, Stashed)> {
        let detached = |values: &[Tensor]| -> Result<Vec<Tensor>> {
            values.iter().map(|value| Ok(value.f_detach()?)).collect()
        };
        let input = self.leaves(input, None)?;
        let mut stashed = self.stashed.map(|values| self.leaves(values, None))?;
        let before = self.meter.in_use()?;
        let output = self.forward(input, &mut stashed)?;
        let kept = self.meter.in_use()?.saturating_sub(before);
        Ok((kept, detached(&output)?, stashed.map(detached)?))
    }

    /// Returns the peak bytes of a forward and of its backward, without the input and the gradients of
    /// parameters. Leaves every `grad` untouched.
    pub(super) fn peaks(&self, input: &[Tensor]) -> Result<LayerPeaks> {
        let input = self.leaves(input, None)?;
        let mut stashed = self.stashed.map(|values| self.leaves(values, None))?;
        let traced = input.iter().chain(stashed.all()).chain(&self.parameters);
        let leaves: Vec<Tensor> = traced.map(Tensor::shallow_clone).collect();
        let before = self.meter.in_use()?;
        let run = || self.forward(input, &mut stashed);
        let (output, forward) = self.meter.weighed(before, run)?;
        let (gradients, all) = self.meter.weighed(before, || {
            let groups = [with_gradients(output)?];
            // Without inputs the weight gradient is the whole backward.
            let (_, mut whole) = SplitBackward::input_gradients(&groups, &[])?;
            Ok(whole.weight_gradients(0, &leaves)?)
        })?;
        let of_parameters = gradients.iter().rev().take(self.parameters.len());
        let made: u64 = of_parameters.flatten().map(tensor_bytes).sum();
        Ok(LayerPeaks { forward, backward: all.saturating_sub(made) })
    }

    /// Returns the bytes in use between the input gradient and the weight gradient, including the input if the
    /// weight gradient needs it; `None` if there is no input gradient.
    pub(super) fn kept_between(&self, input: &[Tensor]) -> Result<Option<u64>> {
        let leaves = self.leaves(input, None)?;
        let mut stashed = self.stashed.map(|values| self.leaves(values, None))?;
        let traced = leaves.iter().chain(stashed.all()).filter(|leaf| leaf.requires_grad());
        let inputs: Vec<Tensor> = traced.map(Tensor::shallow_clone).collect();
        let before = self.meter.in_use()?;
        // New tensors, because a graph keeps its leaves alive in any case.
        let value = |leaf: &Tensor| -> Result<Tensor> {
            let zero = Tensor::f_zeros([] as [i64; 0], (leaf.kind(), leaf.device()))?;
            Ok(leaf.f_add(&zero)?)
        };
        let values = leaves.iter().map(value).collect::<Result<Vec<_>>>()?;
        let output = self.forward(values, &mut stashed)?;
        drop(stashed);
        let groups = [with_gradients(output)?];
        if groups[0].is_empty() || inputs.is_empty() {
            return Ok(None);
        }
        let (gradients, weights) = SplitBackward::input_gradients(&groups, &inputs)?;
        drop((groups, gradients));
        let kept = self.meter.in_use()?.saturating_sub(before);
        drop(weights);
        Ok(Some(kept))
    }

    /// Returns the values as the input of a stage: detached, and requiring a gradient unless the layer is
    /// the first.
    fn leaves(&self, values: &[Tensor], few: Option<i64>) -> Result<Vec<Tensor>> {
        let leaf = |value: &Tensor| {
            let leaf = match few {
                Some(few) => value.f_narrow(0, 0, few)?.f_detach()?,
                None => value.f_detach()?,
            };
            let wants_gradient = !self.is_first && leaf.is_floating_point();
            Ok(leaf.f_set_requires_grad(wants_gradient)?)
        };
        values.iter().map(leaf).collect()
    }

    fn forward(&self, input: Vec<Tensor>, stashed: &mut Stashed) -> Result<Vec<Tensor>> {
        let shape = input.first().map(Tensor::size).unwrap_or_default();
        let run = oom::catch(|| Ok::<_, Error>(self.model.run(input, stashed, true, |_| {})));
        run.map_err(|caught| match caught {
            Caught::OutOfMemory(oom) => oom.into(),
            Caught::Error(error) => error,
            Caught::Panic(payload) => LayersError::Run {
                layer: self.name.to_owned(),
                shape,
                message: oom::panic_words(&*payload).unwrap_or_else(|| "a panic".to_owned()),
            }
            .into(),
        })
    }

    /// Returns the seconds that the gradients of `inputs` take, and then those of `others`; zeros if no output
    /// requires a gradient. Leaves every `grad` untouched.
    fn split_backward(
        &self,
        output: Vec<Tensor>,
        inputs: &[Tensor],
        others: &[Tensor],
    ) -> Result<(f64, f64)> {
        let groups = [with_gradients(output)?];
        if groups[0].is_empty() {
            return Ok((0.0, 0.0));
        }
        let input_gradients = || Ok(SplitBackward::input_gradients(&groups, inputs)?);
        let ((gradients, mut weights), input) = self.meter.timed(input_gradients)?;
        drop((groups, gradients));
        if others.is_empty() {
            return Ok((input, 0.0));
        }
        let add_weight_gradients = || Ok(weights.weight_gradients(0, others)?);
        Ok((input, self.meter.timed(add_weight_gradients)?.1))
    }
}

/// Returns the outputs that require a gradient, each with a gradient of ones.
fn with_gradients(output: Vec<Tensor>) -> Result<Vec<(Tensor, Tensor)>> {
    let traced = output.into_iter().filter(Tensor::requires_grad);
    let root = |value: Tensor| {
        let gradient = value.f_ones_like()?;
        Ok((value, gradient))
    };
    traced.map(root).collect()
}

/// Returns whether enough runs took about as long as the fastest.
fn agree(runs: &[LayerTimes]) -> bool {
    let all =
        |run: &LayerTimes| run.forward + run.backward + run.input_gradient + run.weight_gradient;
    let limit = least(runs, all) * AGREEMENT;
    runs.iter().filter(|run| all(run) <= limit).count() >= AGREEING_RUNS
}

fn least(runs: &[LayerTimes], of: impl Fn(&LayerTimes) -> f64) -> f64 {
    runs.iter().map(of).fold(f64::INFINITY, f64::min)
}
