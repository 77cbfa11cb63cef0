//! Barrier across all micro-batches of a step, before a stage that begins with an exact BatchNorm.
//!
//! ```text
//!   F of the previous stage   counts each micro-batch as it sends it
//!   F of the stage            all are counted: their statistics normalise each one
//!   B of the stage            each adds its share of the gradient of these statistics
//!   B of the previous stage   all shares are there: they complete the gradient of each one
//! ```

use tch::Tensor;

use crate::Result;
use crate::accumulate::Accumulator;
use crate::nn::WholeBatchNorm;
use crate::pipeline::error::PipelineError;
use crate::pipeline::site::{Boundary, Site, Stage};
use crate::pipeline::transfers::Tensors;
use crate::statistics::{PairSum, WholeBatch};

/// State of a barrier.
#[derive(Debug, Default)]
struct Barrier {
    micro_batches: usize,
    /// Number of micro-batches counted.
    arrived: usize,
    statistics: WholeBatch,
    /// Statistics, once all micro-batches are counted.
    whole: Option<WholeBatchNorm>,
    /// Number of micro-batches whose backward is done, and the sums of their shares, by group of terms.
    returned: usize,
    sums: Vec<PairSum>,
    /// Missing part of the previous stage's gradients, by group of loss terms, once all shares have arrived.
    missing: Vec<Option<[Tensor; 2]>>,
}

/// Barrier before each of a worker's stages; none before a stage that does not begin with an exact BatchNorm.
#[derive(Debug)]
pub(super) struct Barriers(Vec<Option<Barrier>>);

impl Barriers {
    pub(super) fn before(stages: &[Stage], micro_batches: usize) -> Self {
        let barrier = |stage: &Stage| {
            stage.exact_norm().map(|_| Barrier { micro_batches, ..Barrier::default() })
        };
        Self(stages.iter().map(barrier).collect())
    }

    /// Counts the output for the next stage, if the next stage begins with an exact BatchNorm.
    pub(super) fn count_in(&mut self, at: usize, output: &Boundary) -> Result<()> {
        let next = self.0.get_mut(at + 1).and_then(Option::as_mut);
        let (Some(barrier), Some(x)) = (next, output.values.first()) else { return Ok(()) };
        barrier.arrived += 1;
        barrier.statistics.add(x)
    }

    /// Adds the normalising statistics to a stage's input, if the stage begins with an exact BatchNorm.
    pub(super) fn hold(&mut self, site: &Site, at: usize, input: Boundary) -> Result<Boundary> {
        let (Some(barrier), Some(norm)) = (&mut self.0[at], site.stages[at].exact_norm()) else {
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
        accumulator: &mut Accumulator,
    ) -> Result<()> {
        let Some(barrier) = &mut self.0[at] else { return Ok(()) };
        let groups = gradients.pop().unwrap_or_default();
        barrier.returned += 1;
        barrier.sums.resize_with(groups.len().max(barrier.sums.len()), PairSum::default);
        for (sum, mut probes) in barrier.sums.iter_mut().zip(groups) {
            if let (Some(bias), Some(weight)) = (probes.pop().flatten(), probes.pop().flatten()) {
                sum.add([weight, bias])?;
            }
        }
        if barrier.returned < barrier.micro_batches {
            return Ok(());
        }
        barrier.complete(site, at, accumulator)
    }

    /// Completes the gradients of a stage's output with the sums of the barrier after the stage.
    pub(super) fn completed(
        &self,
        at: usize,
        output: &Boundary,
        mut gradients: Vec<Tensors>,
    ) -> Result<Vec<Tensors>> {
        let next = self.0.get(at + 1).and_then(Option::as_ref);
        let (Some(barrier), Some(x)) = (next, output.values.first()) else { return Ok(gradients) };
        let Barrier { micro_batches, returned, .. } = *barrier;
        if returned < micro_batches {
            return Err(PipelineError::NotAllMet { came: returned, micro_batches }.into());
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

impl Barrier {
    /// Completes the barrier: the sums are the gradients of the BatchNorm's weight and bias, and complete
    /// the gradients of the previous stage.
    fn complete(&mut self, site: &Site, at: usize, accumulator: &mut Accumulator) -> Result<()> {
        let (Some(norm), Some(whole)) = (site.stages[at].exact_norm(), &self.whole) else {
            return Ok(());
        };
        for (group, sum) in std::mem::take(&mut self.sums).into_iter().enumerate() {
            if sum.is_empty() {
                self.missing.push(None);
                continue;
            }
            let total = sum.total()?;
            // Computed before `add_gradient`, because the accumulator adds in place to the tensor that it gets.
            self.missing.push(Some(whole.missing(&total)?));
            for (place, parameter) in norm.trained() {
                accumulator.add_gradient(group, parameter, total.f_select(0, place as i64)?)?;
            }
        }
        Ok(())
    }
}
