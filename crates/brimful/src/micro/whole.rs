//! Losses over the whole mini-batch, such as contrastive ones, in two passes over its micro-batches.
//!
//! ```text
//!   1. every micro-batch forward, without a graph     → outputs of the whole mini-batch
//!   2. the loss on all of them, and its backward      → a gradient for each output
//!   3. every micro-batch forward again, with the same random numbers, and backward from its part
//! ```
//!
//! It costs a second forward, and memory for all outputs, but never for more than one graph.

use std::time::Instant;

use tch::Tensor;

use super::attempt::{Attempt, samples};
use super::tally::Tally;
use super::{MicroBatcher, Step, part};
use crate::accumulate::Accumulator;
use crate::batch::{self, Batch, Leaf};
use crate::loss::Loss;
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
        loss: impl FnOnce(&O) -> Tensor,
    ) -> Result<Step<O>> {
        self.check_no_window()?;
        let start = Instant::now();
        let ranges = self.ranges(batch::len(batch)?)?;
        let ((sums, tally, outputs), undo) = self.guarded(ranges.len(), |this| {
            let mut states = Vec::with_capacity(ranges.len());
            let mut parts = Vec::with_capacity(ranges.len());
            let (_not_counted, rehearsed) = Pending::collect(true, || {
                let _without = tch::no_grad_guard();
                feed::each(batch, &ranges, this.device, |_, micro_batch| {
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
            tally.count(&terms, &part(&ranges, 0, 1.0, true))?;
            accumulator.add(0, &[(&terms[0].value, terms[0].value.f_ones_like()?)], false)?;

            let after = Randomness::now(this.device)?;
            let mut gradients = RowGradients::of(&outputs);
            feed::each(batch, &ranges, this.device, |i, micro_batch| {
                states[i].restore()?;
                let again = forward(micro_batch);
                let roots = gradients.next(&again)?;
                if roots.is_empty() { Ok(()) } else { accumulator.add(0, &roots, false) }
            })?;
            after.restore()?;
            let outputs = outputs.map(&mut |leaf| Ok(leaf.tensor().f_detach()?))?;
            Ok((accumulator.finish()?, tally, outputs))
        })?;
        let groups = tally.groups(true);
        let attempt = Attempt { sums, tally, groups, outputs, undo };
        let (window, outputs) = attempt.into_window(samples(&ranges), &ranges);
        Ok(self.settle(window, start)?.with_outputs(outputs))
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
