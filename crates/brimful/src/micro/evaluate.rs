//! Forward alone, without gradients: a loss and outputs, or outputs alone.

use std::time::Instant;

use brimful_torch::grad_mode::GradMode;

use super::attempt::joined;
use super::{BatchRole, MicroBatcher, StepReport};
use crate::auto::Use;
use crate::batch::{Arranged, Batch, Borrower};
use crate::loss::{IntoLoss, MicroBatchWeight};
use crate::oom::{self, Caught};
use crate::step::{
    self, AttemptContext, Cut, Ending, MicroBatchRun, StepRequest, StoreAttempt, Tally,
};
use crate::{Error, Result};

impl MicroBatcher {
    /// Runs `f` on every micro-batch without gradients, and joins the outputs in sample order.
    ///
    /// # Errors
    /// When a micro-batch fails; random state is then as before.
    pub fn map<B: Batch, O: Batch>(&mut self, batch: &B, mut f: impl FnMut(B) -> O) -> Result<O> {
        let arranged = Arranged::of(batch);
        let request = StepRequest::new(Use::Map, &arranged);
        let step = step::run(self, request, Ending::Commit, |this, context| {
            let (start, AttemptContext { cut, handshake, .. }) = (Instant::now(), context);
            let ran = this.attempt_map(arranged.batch(), cut, handshake.role(0), &mut f);
            this.only_part(start, ran)
        })?;
        Ok(step.outputs)
    }

    /// Runs `f` on every micro-batch without gradients, and returns the mini-batch's loss and outputs.
    ///
    /// # Errors
    /// When a micro-batch fails; random state is then as before.
    pub fn evaluate<B: Batch, R: IntoLoss>(
        &mut self,
        batch: &B,
        mut f: impl FnMut(B) -> R,
    ) -> Result<StepReport<R::Outputs>> {
        let arranged = Arranged::of(batch);
        let request = StepRequest::new(Use::Evaluate, &arranged);
        step::run(self, request, Ending::Commit, |this, context| {
            let (start, AttemptContext { cut, handshake, .. }) = (Instant::now(), context);
            let ran = this.attempt_evaluate(arranged.batch(), cut, handshake.role(0), &mut f);
            this.only_part(start, ran)
        })
    }

    pub(crate) fn attempt_map<B: Batch, O: Batch>(
        &mut self,
        batch: &B,
        cut: &mut Cut,
        role: BatchRole,
        f: &mut impl FnMut(B) -> O,
    ) -> Result<(StoreAttempt, O), Caught<Error>> {
        self.forward_alone(batch, cut, role, |_, _, micro_batch| Ok(f(micro_batch)))
    }

    pub(crate) fn attempt_evaluate<B: Batch, R: IntoLoss>(
        &mut self,
        batch: &B,
        cut: &mut Cut,
        role: BatchRole,
        f: &mut impl FnMut(B) -> R,
    ) -> Result<(StoreAttempt, R::Outputs), Caught<Error>> {
        self.forward_alone(batch, cut, role, |tally, weight, micro_batch| {
            let (loss, output) = f(micro_batch).into_parts()?;
            // The loss stays on the device until the end, because reading it would wait for the micro-batch.
            tally.count(&loss.into_terms(false)?, weight)?;
            Ok(output)
        })
    }

    /// Runs all micro-batches and commits nothing.
    fn forward_alone<B: Batch, O: Batch>(
        &mut self,
        batch: &B,
        cut: &mut Cut,
        role: BatchRole,
        mut f: impl FnMut(&mut Tally, &MicroBatchWeight, B) -> Result<O>,
    ) -> Result<(StoreAttempt, O), Caught<Error>> {
        self.begin_peak()?;
        let before = self.before()?;
        let ran = oom::catch(|| {
            let _without = tch::no_grad_guard();
            let mut tally = Tally::default();
            let mut outputs = Vec::new();
            let borrower = Borrower::of(&f);
            let mut micro_batches = cut.micro_batches(batch, role, &self.copy_streams, borrower);
            while let Some((info, micro_batch)) = micro_batches.next()? {
                let without = GradMode::set(false);
                let output = f(&mut tally, &info.weight, micro_batch);
                drop(without);
                let output = output.map(|output| outputs.push(output));
                micro_batches.done(output.map(|()| MicroBatchRun::PLAINLY))?;
            }
            drop(micro_batches);
            Ok((tally, joined(outputs, cut.samples())?))
        });
        let ((tally, outputs), undo) = self.end(before, ran)?;
        Ok((self.attempt_of(Default::default(), tally, undo, role, cut), outputs))
    }
}
