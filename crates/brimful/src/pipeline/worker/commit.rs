//! Ends a worker's attempt: reports, prepares and commits it, keeps it for later, or undoes it.

use std::collections::HashMap;
use std::sync::Arc;

use brimful_torch::foreach;
use tch::Tensor;

use super::Worker;
use crate::Result;
use crate::pipeline::ranks::TiedGradient;
use crate::ranks::RanksTurn;
use crate::statistics::Pending;
use crate::step::{PartReport, StepError, Tried, Whole};

impl Worker {
    /// Reports what all parts must know of this attempt.
    pub(crate) fn tell(&mut self, others: bool) -> Result<PartReport> {
        let Some(tried) = &mut self.tried else { return Err(StepError::NothingAccumulated.into()) };
        let mut report = tried.tell(self.site.non_finite, others)?;
        // Every stage ran the same samples: only the first worker counts them.
        if self.number != self.site.layout.first_worker() {
            report.samples = 0;
        }
        report.peak = self.peak;
        report.spans = self.spans.clone();
        report.host_link = self.host_link.clone();
        Ok(report)
    }

    /// Computes all that a commit needs, and returns the gradients that belong to other workers.
    pub(crate) fn prepare(
        &mut self,
        whole: &Arc<Whole>,
        turn: Option<RanksTurn>,
    ) -> Result<Vec<TiedGradient>> {
        let Some(tried) = &mut self.tried else { return Ok(Vec::new()) };
        tried.prepare(whole, self.number, turn.as_ref())?;
        let Some((_, gradients)) = tried.prepared() else { return Ok(Vec::new()) };
        let mut outgoing = Vec::new();
        for (variable, gradient) in self.variables.trained().zip(&mut gradients.0) {
            // Taken out: the commit would leave it in the copy, but only the owner gets it.
            if !self.variables.owns(variable)
                && let Some(gradient) = gradient.take()
            {
                outgoing.push((variable.owner, variable.name.clone(), gradient));
            }
        }
        Ok(outgoing)
    }

    /// Adds gradients of copies on other workers to the owner's.
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
            // To the device where the parameter is stored, which need not be the one that computes.
            let gradient = gradient.f_to_device(parameters[*at].device())?;
            // Into the prepared gradients, not into the parameters: the vote is still to come.
            match &gradients.0[*at] {
                Some(sum) => foreach::add(&[sum.shallow_clone()], &[gradient], 1.0)?,
                None => gradients.0[*at] = Some(gradient),
            }
        }
        Ok(())
    }

    /// Refuses to commit prepared gradients that are not finite, by the policy.
    pub(crate) fn check_finite(&self) -> Result<()> {
        self.tried.as_ref().map_or(Ok(()), |tried| tried.check_finite(self.site.non_finite))
    }

    /// Takes the layers' statistics out, filed under these variables of another worker.
    pub(crate) fn hand_statistics(
        &mut self,
        twins: &[(String, Tensor)],
    ) -> Result<Option<Pending>> {
        let Some(tried) = &mut self.tried else { return Ok(None) };
        let own = self.variables.all().map(|v| (v.tensor.data_ptr(), v.name.as_str()));
        let own: HashMap<_, &str> = own.collect();
        let twins: HashMap<&str, &Tensor> = twins.iter().map(|(n, t)| (n.as_str(), t)).collect();
        // Taken out: filed under the owner's variables, they would update those from here too.
        let mut statistics = std::mem::take(&mut tried.undo.statistics);
        statistics.hand_to(|tensor| {
            let name = own.get(&tensor.data_ptr())?;
            twins.get(name).map(|twin| twin.shallow_clone())
        })?;
        Ok(Some(statistics))
    }

    /// Adds the same layers' statistics of other replicas.
    pub(crate) fn join_statistics(&mut self, others: Vec<Pending>) -> Result<()> {
        let Some(tried) = &mut self.tried else { return Ok(()) };
        tried.undo.statistics.pool()?;
        others.into_iter().for_each(|other| tried.undo.statistics.extend(other));
        Ok(())
    }

    /// Commits the step. Allocates nothing.
    pub(crate) fn commit(&mut self) -> Result<()> {
        self.updated = 0;
        self.tried.take().map_or(Ok(()), |mut tried| tried.commit())
    }

    /// Restores the state before the mini-batch under way.
    pub(crate) fn undo(&mut self) -> Result<()> {
        if let Some((run, undo)) = self.open.take() {
            // The graphs first: restoring may need their memory.
            drop(run);
            undo.run()?;
        }
        self.tried.take().map_or(Ok(()), |tried| tried.undo.run())
    }

    /// Detaches the attempt, so that it can wait for later mini-batches of its step.
    pub(crate) fn make_lasting(&mut self) -> Result<()> {
        let Some(tried) = &mut self.tried else { return Ok(()) };
        let both = |window: &&Tried| window.samples() > 0 && tried.samples() > 0;
        let window = self.window.as_ref().filter(both);
        tried.make_lasting(window)
    }

    /// Adds the attempt to the accumulation window.
    pub(crate) fn keep(&mut self) -> Result<()> {
        match (&mut self.window, self.tried.take()) {
            // A mini-batch without a sample for this replica has no sums to add to, and no loss whose terms
            // others would have to match.
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

    /// Makes the accumulation window the current attempt.
    pub(crate) fn reopen(&mut self) {
        self.tried = self.window.take();
    }

    /// Fails if other parameters are trained than when the accumulation window was opened.
    pub(crate) fn check_trained(&self) -> Result<()> {
        self.window.as_ref().map_or(Ok(()), |window| window.check_trained())
    }
}
