//! What becomes of a worker's try: told, prepared and put in place, kept for later, or taken back.

use std::collections::HashMap;
use std::sync::Arc;

use brimful_torch::foreach;
use tch::Tensor;

use super::Worker;
use crate::Result;
use crate::pipeline::ranks::Leaving;
use crate::ranks::RanksTurn;
use crate::statistics::Pending;
use crate::step::{PartReport, StepError, Tried, Whole};

impl Worker {
    /// What all have to know of what it has tried.
    pub(crate) fn tell(&mut self, others: bool) -> Result<PartReport> {
        let Some(tried) = &mut self.tried else { return Err(StepError::NothingAccumulated.into()) };
        let mut report = tried.tell(self.site.non_finite, others)?;
        // Every stage has run the same samples: one of them counts them.
        if self.number != self.site.layout.first_worker() {
            report.samples = 0;
        }
        report.peak = self.peak;
        report.spans = self.spans.clone();
        report.bus = self.bus.clone();
        Ok(report)
    }

    /// Computes all that a commit needs, and gives the gradients that belong to other workers.
    pub(crate) fn prepare(
        &mut self,
        whole: &Arc<Whole>,
        turn: Option<RanksTurn>,
    ) -> Result<Vec<Leaving>> {
        let Some(tried) = &mut self.tried else { return Ok(Vec::new()) };
        tried.prepare(whole, self.number, turn.as_ref())?;
        let Some((_, gradients)) = tried.prepared() else { return Ok(Vec::new()) };
        let mut leaving = Vec::new();
        for (variable, gradient) in self.variables.trained().zip(&mut gradients.0) {
            // Taken out: the commit would leave it in the copy, and only the owner is to have it.
            if !self.variables.owns(variable)
                && let Some(gradient) = gradient.take()
            {
                leaving.push((variable.owner, variable.name.clone(), gradient));
            }
        }
        Ok(leaving)
    }

    /// Adds what copies on other workers have gathered.
    pub(crate) fn join(&mut self, arriving: Vec<(String, Tensor)>) -> Result<()> {
        let Some((parameters, gradients)) = self.tried.as_mut().and_then(|tried| tried.prepared())
        else {
            return Ok(());
        };
        let names = self.variables.trained().enumerate().map(|(at, v)| (v.name.as_str(), at));
        let places: HashMap<&str, usize> = names.collect();
        gradients.0.resize_with(places.len(), || None);
        for (name, gradient) in arriving {
            let Some(at) = places.get(name.as_str()) else { continue };
            // Where the parameter lives, which need not be where it computes.
            let gradient = gradient.f_to_device(parameters[*at].device())?;
            // Into what is prepared, not into the parameters: the vote is still to come.
            match &gradients.0[*at] {
                Some(sum) => foreach::add(&[sum.shallow_clone()], &[gradient], 1.0)?,
                None => gradients.0[*at] = Some(gradient),
            }
        }
        Ok(())
    }

    /// Refuses what was prepared where it is not to be committed because it is not finite.
    pub(crate) fn check_finite(&self) -> Result<()> {
        self.tried.as_ref().map_or(Ok(()), |tried| tried.check_finite(self.site.non_finite))
    }

    /// What its layers have seen, filed under these variables of another worker.
    pub(crate) fn hand_statistics(
        &mut self,
        twins: &[(String, Tensor)],
    ) -> Result<Option<Pending>> {
        let Some(tried) = &mut self.tried else { return Ok(None) };
        let own = self.variables.all().map(|v| (v.tensor.data_ptr(), v.name.as_str()));
        let own: HashMap<_, &str> = own.collect();
        let twins: HashMap<&str, &Tensor> = twins.iter().map(|(n, t)| (n.as_str(), t)).collect();
        // Taken out: filed under the owner's variables, they would move those from here as well.
        let mut statistics = std::mem::take(&mut tried.undo.statistics);
        statistics.hand_to(|tensor| {
            let name = own.get(&tensor.data_ptr())?;
            twins.get(name).map(|twin| twin.shallow_clone())
        })?;
        Ok(Some(statistics))
    }

    /// Adds what the same layers have seen in other replicas.
    pub(crate) fn join_statistics(&mut self, others: Vec<Pending>) -> Result<()> {
        let Some(tried) = &mut self.tried else { return Ok(()) };
        tried.undo.statistics.pool()?;
        others.into_iter().for_each(|other| tried.undo.statistics.extend(other));
        Ok(())
    }

    /// Lets the step stand. Nothing is allocated.
    pub(crate) fn commit(&mut self) -> Result<()> {
        self.updated = 0;
        self.tried.take().map_or(Ok(()), |mut tried| tried.commit())
    }

    /// Leaves everything as it was before the mini-batch that is under way.
    pub(crate) fn undo(&mut self) -> Result<()> {
        if let Some((run, undo)) = self.open.take() {
            // Its graphs first: what is put back below may need their memory.
            drop(run);
            undo.run()?;
        }
        self.tried.take().map_or(Ok(()), |tried| tried.undo.run())
    }

    /// Makes what was tried ready to wait for later mini-batches of its step.
    pub(crate) fn make_lasting(&mut self) -> Result<()> {
        let Some(tried) = &mut self.tried else { return Ok(()) };
        let both = |window: &&Tried| window.samples() > 0 && tried.samples() > 0;
        let window = self.window.as_ref().filter(both);
        tried.make_lasting(window)
    }

    /// Adds what was tried to the mini-batches that wait.
    pub(crate) fn keep(&mut self) -> Result<()> {
        match (&mut self.window, self.tried.take()) {
            // A mini-batch without a sample for this replica has no sums that others could be added
            // to, nor a loss whose terms they would have to have.
            (Some(window), Some(tried)) if window.samples() > 0 && tried.samples() > 0 => {
                window.extend(tried)
            }
            (Some(window), tried) if window.samples() > 0 || tried.is_none() => Ok(()),
            (_, tried) => {
                self.window = tried;
                Ok(())
            }
        }
    }

    /// Takes the mini-batches that wait for what was tried last.
    pub(crate) fn reopen(&mut self) {
        self.tried = self.window.take();
    }

    /// Refuses where other parameters are trained now than when the window was opened.
    pub(crate) fn check_trained(&self) -> Result<()> {
        self.window.as_ref().map_or(Ok(()), |window| window.check_trained())
    }
}
