//! Losses over the whole mini-batch on one device, in two passes over its micro-batches.
//!
//! ```text
//!   1. every micro-batch forward, without a graph     → outputs of the whole mini-batch
//!   2. the loss on all of them, and its backward      → a gradient for each output
//!   3. every micro-batch forward again, with the same random numbers, and backward from its part
//! ```
//!
//! The cost is a second forward, and memory for all outputs. At most one autograd graph exists at a time.

use std::ops::Range;
use std::time::Instant;

use brimful_torch::grad_mode::GradMode;
use tch::Tensor;

use super::{BatchRole, MicroBatcher, StepReport};
use crate::accumulate::{Accumulator, parameters};
use crate::auto::Use;
use crate::batch::{self, Arranged, Batch, Borrower, Leaf, Samples};
use crate::feed::Feed;
use crate::oom::{self, Caught};
use crate::random::Randomness;
use crate::statistics::Collecting;
use crate::step::{
    self, AttemptContext, Cut, Ending, MicroBatchRun, MicroBatches, PartSeed, RowGradients,
    StepError, StepRequest, StoreAttempt, Tally, as_leaves, put_back,
};
use crate::{Error, Result};

impl MicroBatcher {
    /// Runs forward on every micro-batch, the loss on all outputs at once, and backward. Adds to the
    /// parameters' gradients exactly what the full batch would have added, and returns the outputs.
    ///
    /// `forward` runs twice for each micro-batch, with the same random numbers, and must compute the same values
    /// both times. Its outputs have one row per sample.
    ///
    /// # Errors
    /// As [`MicroBatcher::backward`].
    pub fn backward_whole<B: Batch, O: Batch>(
        &mut self,
        batch: &B,
        mut forward: impl FnMut(B) -> O,
        mut loss: impl FnMut(&O) -> Tensor,
    ) -> Result<StepReport<O>> {
        if !self.state.team.is_alone() {
            return Err(StepError::NotOverRanks { ranks: self.state.team.world.size() }.into());
        }
        let arranged = Arranged::of(batch);
        let request = StepRequest::new(Use::TrainWhole, &arranged);
        step::run(self, request, Ending::Commit, |this, context| {
            let (start, AttemptContext { cut, handshake, .. }) = (Instant::now(), context);
            let role = handshake.role(0);
            let batch = arranged.batch();
            let ran = this.attempt_whole(batch, cut, role, &mut forward, &mut loss);
            this.only_part(start, ran)
        })
    }

    fn attempt_whole<B: Batch, O: Batch>(
        &mut self,
        batch: &B,
        cut: &mut Cut,
        role: BatchRole,
        forward: &mut impl FnMut(B) -> O,
        loss: &mut impl FnMut(&O) -> Tensor,
    ) -> Result<(StoreAttempt, O), Caught<Error>> {
        self.begin_peak()?;
        let before = self.before()?;
        let ran = oom::catch(|| {
            let ranges = cut.all()?;
            let samples = cut.samples();
            let (outputs, states) = self.forward_once(batch, &ranges, samples, forward)?;
            let own = parameters(&self.variables);
            let mut accumulator = Accumulator::begin(own, &self.variables)?.summing_others(true);
            let loss = in_users_order(samples, &outputs, &mut *loss)?;
            let tally = weighed(&mut accumulator, loss, &outputs)?;
            // The second pass draws the random numbers of the first again. Afterwards the generators return to
            // their state after the loss, so the next step draws as if there had been one pass.
            let after = Randomness::now(self.device)?;
            let gradients = RowGradients::of(&outputs);
            let borrower = Borrower::of(forward);
            let mut feed = Feed::new(batch, ranges, &self.copy_streams, borrower)?;
            let mut states = states.iter();
            while let Some((range, micro_batch)) = feed.next()? {
                states.next().map_or(Ok(()), Randomness::restore)?;
                let graphs = GradMode::set(true);
                let outputs = forward(micro_batch);
                drop(graphs);
                let rows = gradients.rows(&range);
                feed.done(rows.and_then(|rows| back(&mut accumulator, rows, outputs)))?;
            }
            after.restore()?;
            let summed = accumulator.finish()?;
            // Detached, because leaves would keep their gradients alive for as long as the caller holds the
            // outputs.
            Ok((summed, tally, samples.restored(batch::detached(&outputs)?)?))
        });
        let ((summed, tally, outputs), undo) = self.end(before, ran)?;
        self.judge(&undo, cut);
        Ok((self.attempt_of(summed, tally, undo, role, cut), outputs))
    }

    /// Runs forward on every micro-batch without a graph. Returns all outputs, and the state of the generators
    /// before each micro-batch. Running statistics stay as they are.
    fn forward_once<B: Batch, O: Batch>(
        &self,
        batch: &B,
        ranges: &[Range<usize>],
        samples: &Samples,
        forward: &mut impl FnMut(B) -> O,
    ) -> Result<(O, Vec<Randomness>)> {
        let mut states = Vec::with_capacity(ranges.len());
        let mut parts = Vec::with_capacity(ranges.len());
        // BatchNorm sees each micro-batch twice: only the second pass, which has the graph, counts.
        let unmanaged = self.unmanaged.save(&self.variables)?;
        let not_counted = Collecting::begin(true);
        let without = tch::no_grad_guard();
        let borrower = Borrower::of(forward);
        let mut feed = Feed::new(batch, ranges.to_vec(), &self.copy_streams, borrower)?;
        while let Some((_, micro_batch)) = feed.next()? {
            states.push(Randomness::now(self.device)?);
            let mode = GradMode::set(false);
            parts.push(forward(micro_batch));
            drop(mode);
            feed.done(Ok(()))?;
        }
        drop((feed, without, not_counted));
        put_back(unmanaged)?;
        Ok((as_leaves(&samples.join(parts)?)?, states))
    }

    /// Runs the loss on all outputs, without the passes over micro-batches. Returns the loss's own part of the
    /// step and a gradient for each output.
    pub(crate) fn attempt_loss<O: Batch>(
        &mut self,
        outputs: &O,
        samples: &Samples,
        seed: PartSeed,
        loss: impl FnOnce(&O) -> Tensor,
    ) -> Result<(StoreAttempt, RowGradients), Caught<Error>> {
        let cut = Cut::given(Samples::default(), MicroBatches::Count(1))?;
        let before = self.before()?;
        let ran = oom::catch(|| {
            let generator = seed.on(self.device);
            generator.begin(0);
            let outputs = as_leaves(outputs)?;
            let mut accumulator = Accumulator::begin(parameters(&self.variables), &self.variables)?;
            let loss = in_users_order(samples, &outputs, loss)?;
            let tally = weighed(&mut accumulator, loss, &outputs)?;
            Ok((accumulator.finish()?, tally, RowGradients::of(&outputs)))
        });
        let ((summed, tally, gradients), undo) = self.end(before, ran)?;
        let seed = Some(seed);
        let role = BatchRole { unit: 1.0, first: true, begins: true, last: true, seed };
        Ok((self.attempt_of(summed, tally, undo, role, &cut), gradients))
    }

    /// Reruns forward on these micro-batches, and backward from their outputs' gradients.
    pub(crate) fn attempt_back<B: Batch, O: Batch>(
        &mut self,
        batch: &B,
        cut: &mut Cut,
        role: BatchRole,
        gradients: &RowGradients,
        forward: &impl Fn(B) -> O,
    ) -> Result<StoreAttempt, Caught<Error>> {
        let before = self.before()?;
        let ran = oom::catch(|| {
            let mut accumulator = Accumulator::begin(parameters(&self.variables), &self.variables)?;
            accumulator.expect_groups(1);
            let borrower = Borrower::of(forward);
            let mut micro_batches = cut.micro_batches(batch, role, &self.copy_streams, borrower);
            while let Some((info, micro_batch)) = micro_batches.next()? {
                let graphs = GradMode::set(true);
                let outputs = forward(micro_batch);
                drop(graphs);
                let rows = gradients.rows(&info.range);
                let ran = rows.and_then(|rows| back(&mut accumulator, rows, outputs));
                micro_batches.done(ran.map(|()| MicroBatchRun::PLAINLY))?;
            }
            drop(micro_batches);
            accumulator.finish()
        });
        let (summed, undo) = self.end(before, ran)?;
        self.judge(&undo, cut);
        Ok(self.attempt_of(summed, Tally::default(), undo, role, cut))
    }
}

/// Returns the loss on the outputs, sorted into the user's order. Autograd sorts the gradient back into the order
/// in which the samples ran.
fn in_users_order<O: Batch>(
    samples: &Samples,
    outputs: &O,
    loss: impl FnOnce(&O) -> Tensor,
) -> Result<Tensor> {
    let outputs = outputs.map(&mut |leaf| Ok(leaf.tensor().shallow_clone()))?;
    let outputs = samples.restored(outputs)?;
    let _graphs = GradMode::set(true);
    Ok(loss(&outputs))
}

/// Counts the loss, and runs its backward down to the outputs.
fn weighed(accumulator: &mut Accumulator, loss: Tensor, outputs: &impl Batch) -> Result<Tally> {
    let (tally, loss) = Tally::of_whole(loss)?;
    let ends: Vec<_> = batch::leaves(outputs).into_iter().map(Leaf::tensor).collect();
    accumulator.expect_groups(1);
    accumulator.add(0, &[(&loss, loss.f_ones_like()?)], &ends, false)?;
    Ok(tally)
}

/// Runs backward from a micro-batch's outputs, and drops them.
fn back(accumulator: &mut Accumulator, rows: RowGradients, outputs: impl Batch) -> Result<()> {
    let roots = rows.roots(&outputs)?;
    if roots.is_empty() {
        return Ok(());
    }
    accumulator.add(0, &roots, &[], false)
}
