//! What becomes of a worker's try: everything is prepared and then put in place, or taken back.

use tch::Tensor;

use super::ties::Leaving;
use super::worker::Worker;
use crate::Result;
use crate::accumulate::check_dense;
use crate::statistics::Layer;

/// The number of the statistics' sum in a turn, which is none of a bucket's.
const STATISTICS: usize = u32::MAX as usize;

/// What a worker has seen in a step, in all pipelines together.
#[derive(Debug, Clone, Default)]
pub(super) struct Seen {
    /// Which parameters have got gradients.
    pub(super) present: Vec<bool>,
    pub(super) layers: Vec<Layer>,
}

impl Worker {
    /// Computes all that a commit needs, and gives the gradients that belong to other workers.
    pub(super) fn prepare(&mut self, factors: &[f64], seen: Seen) -> Result<Vec<Leaving>> {
        let Some(attempt) = &mut self.attempt else { return Ok(Vec::new()) };
        check_dense(&attempt.parameters, &self.store.variables_)?;
        let sums = std::mem::take(&mut attempt.sums);
        let mut finished = match &attempt.summing {
            Some(turn) => {
                let variable = |name: &str| {
                    let mut all = self.variables.all();
                    Some(all.find(|variable| variable.name == name)?.tensor.shallow_clone())
                };
                let statistics = &mut attempt.undo.statistics;
                statistics.sum_over_ranks(turn, STATISTICS, seen.layers, variable)?;
                // All have divided by the samples of all until now, so one factor is everyone's.
                let alike = factors.len() <= 1;
                sums.finish_over_ranks(&attempt.parameters, factors, alike, turn, &seen.present)?
            }
            None => sums.finish(&attempt.parameters, factors)?,
        };
        let moved = attempt.undo.statistics.prepare()?;
        let mut leaving = Vec::new();
        for (variable, gradient) in self.variables.trained().zip(&mut finished.0) {
            if variable.owner != self.number
                && let Some(gradient) = gradient.take()
            {
                leaving.push((variable.owner, variable.name.clone(), gradient));
            }
        }
        attempt.prepared = Some((finished, moved));
        Ok(leaving)
    }

    /// Adds what copies on other workers have gathered.
    pub(super) fn join(&mut self, arriving: Vec<(String, Tensor)>) -> Result<()> {
        let prepared = self.attempt.as_mut().and_then(|attempt| attempt.prepared.as_mut());
        let Some((finished, _)) = prepared else { return Ok(()) };
        for (name, gradient) in arriving {
            let at = self.variables.trained().position(|variable| variable.name == name);
            let Some(sum) = at.map(|at| &mut finished.0[at]) else { continue };
            let gradient = gradient.f_to_device(self.site.device)?;
            *sum = Some(match sum.take() {
                Some(sum) => sum.f_add(&gradient)?,
                None => gradient,
            });
        }
        Ok(())
    }

    /// Lets the step stand. Nothing is allocated.
    pub(super) fn commit(&mut self) -> Result<()> {
        let Some(mut attempt) = self.attempt.take() else { return Ok(()) };
        let Some((finished, moved)) = attempt.prepared.take() else { return Ok(()) };
        finished.apply(&mut attempt.parameters)?;
        moved.apply()
    }

    /// Leaves everything as it was before the step.
    pub(super) fn undo(&mut self) -> Result<()> {
        if let Some((run, undo)) = self.open.take() {
            drop(run);
            undo.run()?;
        }
        self.attempt.take().map_or(Ok(()), |attempt| attempt.undo.run())
    }
}
