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

use tch::Tensor;

use super::cut::Cut;
use super::tally::Tally;
use super::{MicroBatcher, Step, Window};
use crate::accumulate::Accumulator;
use crate::auto::{Story, Use};
use crate::batch::{self, Batch, Leaf};
use crate::loss::{Loss, Part};
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
                feed::each(batch, ranges, this.device, |_, micro_batch| {
                    states.push(Randomness::now(this.device)?);
                    parts.push(forward(micro_batch));
                    Ok(())
                })
            });
            rehearsed?;
            let outputs = as_leaves(&batch::join(parts)?)?;

            let mut accumulator = Accumulator::begin(this.parameters())?;
            accumulator.expect_groups(1);
            let terms = Loss::sum(loss(&outputs)).into_terms(true)?;
            let mut tally = Tally::default();
            let samples = ranges[0].len() as f64;
            tally.count(&terms, &Part { samples, unit: 1.0, first: true })?;
            accumulator.add(0, &[(&terms[0].value, terms[0].value.f_ones_like()?)], false)?;

            let after = Randomness::now(this.device)?;
            let mut gradients = RowGradients::of(&outputs);
            feed::each(batch, ranges, this.device, |i, micro_batch| {
                states[i].restore()?;
                let again = forward(micro_batch);
                let roots = gradients.next(&again)?;
                if roots.is_empty() { Ok(()) } else { accumulator.add(0, &roots, false) }
            })?;
            after.restore()?;
            let outputs = outputs.map(&mut |leaf| Ok(leaf.tensor().f_detach()?))?;
            Ok((accumulator.finish()?, tally, outputs))
        };
        let ((sums, tally, outputs), undo) =
            self.guarded(cut, |this, cut| cut.whole(this.device, |ranges| run(this, ranges)))?;
        let (groups, unit) = (tally.groups(true), cut.samples() as f64);
        let (sizes, peak, story) = (cut.sizes().to_vec(), cut.peak(), Story::default());
        Ok((Window { sums, tally, groups, undo, unit, sizes, peak, story }, outputs))
    }
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
struct RowGradients {
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
