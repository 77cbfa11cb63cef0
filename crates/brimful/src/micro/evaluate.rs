//! Forward alone, without gradients: a loss and outputs, or outputs alone.

use std::time::Instant;

use super::attempt::joined;
use super::{BatchRole, MicroBatcher, Outcome, Parts, Step};
use crate::accumulate::Sums;
use crate::auto::Use;
use crate::batch::{Arranged, Batch};
use crate::gradient_mode::with_graphs;
use crate::layout::InOrder;
use crate::loss::MicroBatchWeight;
use crate::step::{self, Brought, Cut, Failed, MicroBatchInfo, MicroBatchRun, Tally, Tried, Try};
use crate::{Result, oom};

impl MicroBatcher {
    /// Runs `f` on every micro-batch without gradients, and joins what it returns in sample order.
    ///
    /// # Errors
    /// When a micro-batch fails; random state is then as before.
    pub fn map<B: Batch, O: Batch>(&mut self, batch: &B, mut f: impl FnMut(B) -> O) -> Result<O> {
        let arranged = Arranged::of(batch)?;
        self.in_order(|this| {
            step::map(this, Brought::new(Use::Map, &arranged), |this, this_try| {
                this.forward_part(this_try, |this, cut, role| {
                    this.attempt_map(arranged.batch(), cut, role, &mut f)
                })
            })
        })
    }

    /// Runs `f` on every micro-batch without gradients, and gives the mini-batch's loss and outputs.
    ///
    /// # Errors
    /// When a micro-batch fails; random state is then as before.
    pub fn evaluate<B: Batch, R: Outcome>(
        &mut self,
        batch: &B,
        mut f: impl FnMut(B) -> R,
    ) -> Result<Step<R::Outputs>> {
        let arranged = Arranged::of(batch)?;
        self.in_order(|this| {
            step::run(this, Brought::new(Use::Evaluate, &arranged), |this, this_try| {
                this.forward_part(this_try, |this, cut, role| {
                    this.attempt_evaluate(arranged.batch(), cut, role, &mut f)
                })
            })
        })
    }

    /// Runs a forward as the only part in this process.
    fn forward_part<O>(
        &mut self,
        this_try: Try<'_>,
        run: impl FnOnce(&mut Self, &mut Cut, BatchRole) -> Result<(Tried, O)>,
    ) -> Result<(Parts, O), Failed> {
        let start = Instant::now();
        let Try { cut, opening, .. } = this_try;
        let (tried, outputs) = oom::catch(|| run(self, cut, opening.role(0)))?;
        Ok((self.as_parts(tried, start)?, outputs))
    }

    pub(crate) fn attempt_map<B: Batch, O: Batch>(
        &mut self,
        batch: &B,
        cut: &mut Cut,
        role: BatchRole,
        f: &mut impl FnMut(B) -> O,
    ) -> Result<(Tried, O)> {
        self.forward_alone(batch, cut, role, |_, _, micro_batch| Ok(f(micro_batch)))
    }

    pub(crate) fn attempt_evaluate<B: Batch, R: Outcome>(
        &mut self,
        batch: &B,
        cut: &mut Cut,
        role: BatchRole,
        f: &mut impl FnMut(B) -> R,
    ) -> Result<(Tried, R::Outputs)> {
        self.forward_alone(batch, cut, role, |tally, weight, micro_batch| {
            let (loss, output) = f(micro_batch).into_parts()?;
            // On the device until the end: reading each loss would wait for each micro-batch.
            tally.count(&loss.into_terms(false)?, weight)?;
            Ok(output)
        })
    }

    /// Runs all micro-batches. Nothing is committed yet.
    fn forward_alone<B: Batch, O: Batch>(
        &mut self,
        batch: &B,
        cut: &mut Cut,
        role: BatchRole,
        mut f: impl FnMut(&mut Tally, &MicroBatchWeight, B) -> Result<O>,
    ) -> Result<(Tried, O)> {
        let ((tally, outputs), undo) = self.guarded(cut, |this, cut| {
            let _without = tch::no_grad_guard();
            let mut tally = Tally::default();
            let mut outputs = Vec::new();
            cut.each(batch, role, &this.copies, |MicroBatchInfo { weight, .. }, micro_batch| {
                outputs.push(with_graphs(false, || f(&mut tally, &weight, micro_batch))?);
                Ok(MicroBatchRun::PLAINLY)
            })?;
            Ok((tally, joined(outputs, cut.samples())?))
        })?;
        let groups = tally.groups(true);
        let summed = (Sums::default(), tally, groups);
        Ok((self.tried((Vec::new(), summed), undo, role.unit, cut), outputs))
    }
}
