//! Losses over the whole mini-batch, such as contrastive ones, in two passes over its micro-batches.
//!
//! ```text
//!   1. every micro-batch forward, without a graph     → outputs of the whole mini-batch
//!   2. the loss on all of them, and its backward      → a gradient for each output
//!   3. every micro-batch forward again, with the same random numbers, and backward from its part
//! ```
//!
//! It costs a second forward, and memory for all outputs, but never for more than one graph.

use std::ops::Range;
use std::time::Instant;

use tch::{Device, Tensor};

use super::attempt::{OwnDraws, Scale, Undo};
use super::cut::{Cut, Place, Ran};
use super::tally::Tally;
use super::{MicroBatcher, Step, Window};
use crate::accumulate::{Accumulator, Sums};
use crate::auto::Use;
use crate::batch::{self, Batch, Leaf};
use crate::random::Randomness;
use crate::statistics::Pending;
use crate::{Error, Result, feed};

impl MicroBatcher {
    /// Runs forward on every micro-batch, the loss on all outputs at once, and backward; adds to the
    /// parameters' gradients what the full batch would have added. Gives the outputs back.
    ///
    /// `forward` is called twice for each micro-batch and must do the same both times; random
    /// numbers are the same. Its outputs have one row a sample.
    ///
    /// # Errors
    /// As [`MicroBatcher::backward`].
    pub fn backward_whole<B: Batch, O: Batch>(
        &mut self,
        batch: &B,
        mut forward: impl FnMut(B) -> O,
        mut loss: impl FnMut(&O) -> Tensor,
    ) -> Result<Step<O>> {
        self.check_no_window()?;
        self.check_alone()?;
        let start = Instant::now();
        let (step, story) = self.sized(Use::TrainWhole, batch, |this, cut| {
            let (window, outputs) = this.attempt_whole(batch, cut, &mut forward, &mut loss)?;
            Ok(this.settle(window, start)?.with_outputs(outputs))
        })?;
        self.reserved = 0;
        Ok(step.with_story(story))
    }

    fn attempt_whole<B: Batch, O: Batch>(
        &mut self,
        batch: &B,
        cut: &mut Cut,
        forward: &mut impl FnMut(B) -> O,
        loss: &mut impl FnMut(&O) -> Tensor,
    ) -> Result<(Window, O)> {
        let mut run = |this: &Self, ranges: &[Range<usize>]| {
            let mut states = Vec::with_capacity(ranges.len());
            let mut parts = Vec::with_capacity(ranges.len());
            let (_not_counted, rehearsed) = Pending::collect(true, || {
                let _without = tch::no_grad_guard();
                feed::each(batch, ranges, &this.copies, |_, micro_batch| {
                    states.push(Randomness::now(this.device)?);
                    parts.push(forward(micro_batch));
                    Ok(())
                })
            });
            rehearsed?;
            let outputs = as_leaves(&batch::join(parts)?)?;

            let mut accumulator = Accumulator::begin(this.parameters(), &this.variables)?;
            let tally = weighed(&mut accumulator, loss(&outputs))?;
            let after = Randomness::now(this.device)?;
            let mut gradients = RowGradients::of(&outputs);
            feed::each(batch, ranges, &this.copies, |i, micro_batch| {
                states[i].restore()?;
                gradients.back(&forward(micro_batch), &mut accumulator)
            })?;
            after.restore()?;
            let outputs = outputs.map(&mut |leaf| Ok(leaf.tensor().f_detach()?))?;
            Ok((accumulator.finish()?, tally, outputs))
        };
        let ((sums, tally, outputs), undo) =
            self.trained(cut, |this, cut| cut.whole(this.device, |ranges| run(this, ranges)))?;
        Ok((Window::of_whole(sums, tally, undo, cut), outputs))
    }

    /// The loss on all outputs, which other parts of the step go on from: what it adds itself, and a
    /// gradient for each output.
    pub(crate) fn attempt_loss<O: Batch>(
        &mut self,
        outputs: &O,
        draws: OwnDraws,
        loss: impl FnOnce(&O) -> Tensor,
    ) -> Result<(Window, RowGradients)> {
        let mut cut = Cut::given(Vec::new());
        let ((sums, tally, gradients), undo) = self.guarded(&mut cut, |this, _| {
            let dice = draws.on(this.device);
            dice.begin(0);
            let outputs = as_leaves(outputs)?;
            let mut accumulator = Accumulator::begin(this.parameters(), &this.variables)?;
            let tally = weighed(&mut accumulator, loss(&outputs))?;
            Ok((accumulator.finish()?, tally, RowGradients::of(&outputs)))
        })?;
        Ok((Window::of_whole(sums, tally, undo, &cut), gradients))
    }

    /// Forward again on these micro-batches, and backward from their outputs' gradients.
    pub(crate) fn attempt_back<B: Batch, O: Batch>(
        &mut self,
        batch: &B,
        cut: &mut Cut,
        scale: Scale,
        mut gradients: RowGradients,
        forward: &impl Fn(B) -> O,
    ) -> Result<Window> {
        let (sums, undo) = self.trained(cut, |this, cut| {
            let mut accumulator = Accumulator::begin(this.parameters(), &this.variables)?;
            accumulator.expect_groups(1);
            let dice = scale.draws.map(|draws| draws.on(this.device));
            cut.each(batch, &this.copies, |Place { number, .. }, micro_batch| {
                if let Some(dice) = &dice {
                    dice.begin(number);
                }
                gradients.back(&forward(micro_batch), &mut accumulator)?;
                Ok(Ran::PLAINLY)
            })?;
            accumulator.finish()
        })?;
        Ok(Window::of_whole(sums, Tally::default(), undo, cut))
    }
}

impl Window {
    fn of_whole(sums: Sums, tally: Tally, undo: Undo, cut: &Cut) -> Self {
        let groups = tally.groups(true);
        Self::new(sums, tally, groups, undo, cut.samples() as f64, cut)
    }
}

/// Counts the loss, and runs its backward.
fn weighed(accumulator: &mut Accumulator, loss: Tensor) -> Result<Tally> {
    let (tally, loss) = Tally::of_whole(loss)?;
    accumulator.expect_groups(1);
    accumulator.add(0, &[(&loss, loss.f_ones_like()?)], false)?;
    Ok(tally)
}

/// The outputs as leaves of a graph of their own, which the loss's backward ends at.
fn as_leaves<O: Batch>(outputs: &O) -> Result<O> {
    let mut count = 0;
    outputs.map(&mut |leaf| {
        count += 1;
        match leaf {
            Leaf::Shared(_) => Err(Error::OutputNotRows { leaf: count - 1 }),
            Leaf::Cut(output) => {
                let leaf = output.f_detach()?;
                Ok(if leaf.is_floating_point() { leaf.set_requires_grad(true) } else { leaf })
            }
        }
    })
}

/// Each output's gradient, handed out row by row.
#[derive(Debug)]
pub(crate) struct RowGradients {
    whole: Vec<Tensor>,
    used: Vec<i64>,
}

impl RowGradients {
    fn of(outputs: &impl Batch) -> Self {
        let mut whole = Vec::new();
        outputs.visit(&mut |leaf| whole.push(leaf.tensor().grad()));
        let used = vec![0; whole.len()];
        Self { whole, used }
    }

    /// Those of these rows.
    pub(crate) fn rows(&self, rows: &Range<usize>) -> Result<Self> {
        self.each(|gradient| gradient.f_narrow(0, rows.start as i64, rows.len() as i64))
    }

    /// The same on this device.
    pub(crate) fn on(&self, device: Device) -> Result<Self> {
        self.each(|gradient| gradient.f_to_device(device))
    }

    fn each(&self, f: impl Fn(&Tensor) -> Result<Tensor, tch::TchError>) -> Result<Self> {
        let of =
            |gradient: &Tensor| if gradient.defined() { f(gradient) } else { Ok(Tensor::new()) };
        let whole = self.whole.iter().map(of).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { used: vec![0; whole.len()], whole })
    }

    /// Runs backward from the next micro-batch's outputs.
    fn back(&mut self, outputs: &impl Batch, accumulator: &mut Accumulator) -> Result<()> {
        let roots = self.next(outputs)?;
        if roots.is_empty() { Ok(()) } else { accumulator.add(0, &roots, false) }
    }

    /// The next micro-batch's outputs, each with its rows of the gradient.
    fn next<'a>(&mut self, outputs: &'a impl Batch) -> Result<Vec<(&'a Tensor, Tensor)>> {
        let mut leaves = Vec::new();
        outputs.visit(&mut |leaf| leaves.push(leaf.tensor()));
        let mut roots = Vec::new();
        for (index, output) in leaves.into_iter().enumerate() {
            let rows = *output.size().first().ok_or(Error::OutputNotRows { leaf: index })?;
            let start = self.used[index];
            self.used[index] += rows;
            let gradient = &self.whole[index];
            if gradient.defined() && output.requires_grad() {
                roots.push((output, gradient.f_narrow(0, start, rows)?));
            }
        }
        Ok(roots)
    }
}
