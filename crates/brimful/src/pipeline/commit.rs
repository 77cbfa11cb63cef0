//! What becomes of a worker's try: everything is prepared and then put in place, or taken back.

use tch::Tensor;

use super::ties::Leaving;
use super::worker::Worker;
use crate::Result;

impl Worker {
    /// Computes all that a commit needs, and gives the gradients that belong to other workers.
    pub(super) fn prepare(&mut self, factors: &[f64]) -> Result<Vec<Leaving>> {
        let Some(attempt) = &mut self.attempt else { return Ok(Vec::new()) };
        let moved = attempt.undo.statistics.prepare()?;
        let sums = std::mem::take(&mut attempt.sums);
        let mut finished = sums.finish(&attempt.parameters, factors)?;
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
