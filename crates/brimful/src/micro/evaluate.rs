//! Forward alone, without gradients: a loss and outputs, or outputs alone.

use std::ops::Range;

use super::attempt::{Scale, joined};
use super::cut::{Cut, Place, Ran};
use super::tally::Tally;
use super::{MicroBatcher, Outcome, Step, Window};
use crate::Result;
use crate::accumulate::Sums;
use crate::auto::Use;
use crate::batch::Batch;
use crate::loss::Part;

impl MicroBatcher {
    /// Runs `f` on every micro-batch without gradients, and joins what it returns in sample order.
    ///
    /// # Errors
    /// When a micro-batch fails; random state is then as before.
    pub fn map<B: Batch, O: Batch>(&mut self, batch: &B, mut f: impl FnMut(B) -> O) -> Result<O> {
        let (outputs, _) = self.sized(Use::Map, batch, |this, cut| {
            let scale = Scale::whole(cut);
            let (window, outputs) = this.attempt_map(batch, cut, scale, &mut f)?;
            window.undo.keep()?;
            Ok(outputs)
        })?;
        Ok(outputs)
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
        self.step(Use::Evaluate, batch, |this, cut, scale| {
            this.attempt_evaluate(batch, cut, scale, &mut f)
        })
    }

    pub(crate) fn attempt_map<B: Batch, O: Batch>(
        &mut self,
        batch: &B,
        cut: &mut Cut,
        scale: Scale,
        f: &mut impl FnMut(B) -> O,
    ) -> Result<(Window, O)> {
        self.forward_alone(batch, cut, scale, |_, _, micro_batch| Ok(f(micro_batch)))
    }

    pub(crate) fn attempt_evaluate<B: Batch, R: Outcome>(
        &mut self,
        batch: &B,
        cut: &mut Cut,
        scale: Scale,
        f: &mut impl FnMut(B) -> R,
    ) -> Result<(Window, R::Outputs)> {
        self.forward_alone(batch, cut, scale, |tally, part, micro_batch| {
            let (loss, output) = f(micro_batch).into_parts()?;
            tally.count(&loss.into_terms(false)?, part)?;
            Ok(output)
        })
    }

    /// Runs forward on these micro-batches without a graph: statistics and random state are as before.
    pub(crate) fn rehearse<B: Batch, O: Batch>(
        &mut self,
        batch: &B,
        ranges: Vec<Range<usize>>,
        scale: Scale,
        mut f: impl FnMut(B) -> O,
    ) -> Result<O> {
        let mut cut = Cut::given(ranges);
        let (window, outputs) =
            self.forward_alone(batch, &mut cut, scale, |_, _, micro_batch| Ok(f(micro_batch)))?;
        window.undo.run()?;
        Ok(outputs)
    }

    /// Runs all micro-batches. Nothing is committed yet.
    fn forward_alone<B: Batch, O: Batch>(
        &mut self,
        batch: &B,
        cut: &mut Cut,
        scale: Scale,
        mut f: impl FnMut(&mut Tally, &Part, B) -> Result<O>,
    ) -> Result<(Window, O)> {
        let ((tally, outputs), undo) = self.guarded(cut, |this, cut| {
            let _without = tch::no_grad_guard();
            let (mut tally, mut outputs) = (Tally::default(), Vec::new());
            let dice = scale.draws.map(|draws| draws.on(this.device));
            cut.each(batch, &this.copies, |Place { number: i, samples, .. }, micro_batch| {
                if let Some(dice) = &dice {
                    dice.begin(i);
                }
                let (samples, first) = (samples as f64, scale.first && i == 0);
                let part = Part { samples, unit: scale.unit, first };
                outputs.push(f(&mut tally, &part, micro_batch)?);
                Ok(Ran::PLAINLY)
            })?;
            Ok((tally, joined(outputs)?))
        })?;
        let groups = tally.groups(true);
        Ok((Window::new(Sums::default(), tally, groups, undo, scale.unit, cut), outputs))
    }
}
