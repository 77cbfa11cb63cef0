//! Counts, holds and completes micro-batches at barriers.

use super::barrier::Barrier;
use super::failure::Stop;
use super::worker_run::WorkerRun;
use crate::Result;
use crate::pipeline::error::PipelineError;
use crate::pipeline::site::{Boundary, Site};
use crate::pipeline::transfers::Tensors;
use crate::statistics::PairSum;

impl WorkerRun {
    /// Counts the output for the next stage, if that begins with an exact BatchNorm.
    pub(super) fn count_in(&mut self, at: usize, output: &Boundary) -> Result<()> {
        let trains = self.job.mode.trains();
        let next = self.barriers.get_mut(at + 1).and_then(Option::as_mut).filter(|_| trains);
        let (Some(barrier), Some(x)) = (next, output.values.first()) else { return Ok(()) };
        barrier.arrived += 1;
        barrier.statistics.add(x)
    }

    /// Adds the normalising statistics to a stage's input, if the stage begins with an exact BatchNorm.
    pub(super) fn hold_at_barrier(
        &mut self,
        site: &Site,
        at: usize,
        input: Boundary,
    ) -> Result<Boundary> {
        let trains = self.job.mode.trains();
        let barrier = self.barriers[at].as_mut().filter(|_| trains);
        let (Some(barrier), Some(norm)) = (barrier, site.stages[at].exact_norm()) else {
            return Ok(input);
        };
        let Barrier { micro_batches, arrived, .. } = *barrier;
        if arrived < micro_batches {
            return Err(PipelineError::NotAllMet { came: arrived, micro_batches }.into());
        }
        let x = &input.values[0];
        let whole = match barrier.whole.take() {
            Some(whole) => whole,
            None => norm.finalize(std::mem::take(&mut barrier.statistics), x.kind())?,
        };
        let norm = Some(whole.statistics_of(x));
        barrier.whole = Some(whole);
        Ok(Boundary { norm, ..input })
    }

    /// Takes a micro-batch's share of the statistics' gradient out of `gradients`, and adds it at the barrier
    /// before the stage. The last share completes the barrier.
    pub(super) fn note_probe(
        &mut self,
        site: &Site,
        at: usize,
        gradients: &mut Vec<Tensors>,
    ) -> Result<()> {
        let Some(barrier) = &mut self.barriers[at] else { return Ok(()) };
        let groups = gradients.pop().unwrap_or_default();
        barrier.returned += 1;
        barrier.sums.resize_with(groups.len().max(barrier.sums.len()), PairSum::default);
        for (sum, mut probes) in barrier.sums.iter_mut().zip(groups) {
            if let (Some(bias), Some(weight)) = (probes.pop().flatten(), probes.pop().flatten()) {
                sum.add([weight, bias])?;
            }
        }
        if barrier.returned < barrier.micro_batches {
            Ok(())
        } else {
            self.complete_barrier(site, at)
        }
    }

    /// Completes the barrier: the sums are the gradients of the BatchNorm's weight and bias, and complete
    /// the gradients of the previous stage.
    fn complete_barrier(&mut self, site: &Site, at: usize) -> Result<()> {
        let (Some(barrier), Some(accumulator)) = (&mut self.barriers[at], &mut self.accumulator)
        else {
            return Ok(());
        };
        let (Some(norm), Some(whole)) = (site.stages[at].exact_norm(), &barrier.whole) else {
            return Ok(());
        };
        for (group, sum) in std::mem::take(&mut barrier.sums).into_iter().enumerate() {
            if sum.is_empty() {
                barrier.missing.push(None);
                continue;
            }
            let total = sum.total()?;
            // Before `add_gradient`, because the accumulator adds in place to what it is given.
            barrier.missing.push(Some(whole.missing(&total)?));
            for (place, parameter) in norm.trained() {
                accumulator.add_gradient(group, parameter, total.f_select(0, place as i64)?)?;
            }
        }
        Ok(())
    }

    /// Completes the gradients of a stage's output with the sums of the barrier after it.
    pub(super) fn complete(
        &mut self,
        at: usize,
        output: &Boundary,
        mut gradients: Vec<Tensors>,
    ) -> Result<Vec<Tensors>, Stop> {
        let next = self.barriers.get_mut(at + 1).and_then(Option::as_mut);
        let (Some(barrier), Some(x)) = (next, output.values.first()) else { return Ok(gradients) };
        let Barrier { micro_batches, returned, .. } = *barrier;
        if returned < micro_batches {
            let came = returned;
            return Err(crate::Error::from(PipelineError::NotAllMet { came, micro_batches }).into());
        }
        let Some(whole) = &barrier.whole else { return Ok(gradients) };
        for (group, missing) in gradients[0].iter_mut().zip(&barrier.missing) {
            if let (Some(gradient), Some(missing)) = (group.first_mut(), missing) {
                *gradient = Some(whole.completed(x, gradient.as_ref(), missing)?);
            }
        }
        Ok(gradients)
    }
}
