//! Ends a worker's attempt: reports, prepares and commits it, keeps it for later, or undoes it.

use std::collections::HashMap;
use std::sync::Arc;

use tch::Tensor;

use super::Worker;
use crate::Result;
use crate::pipeline::ranks::{NamedGradients, TiedGradient};
use crate::ranks::RankSum;
use crate::statistics::Pending;
use crate::step::{PartReport, StepError, StoreAttempt, Whole};

impl Worker {
    /// Returns this worker's report on the attempt, which a commit needs from every worker.
    pub(crate) fn tell(&mut self, others: bool) -> Result<PartReport> {
        let Some(attempt) = &mut self.attempt else {
            return Err(StepError::NothingAccumulated.into());
        };
        let mut report = attempt.report(self.site.non_finite, others)?;
        // Every stage ran the same samples: only the first worker counts them.
        if self.number != self.site.layout.first_worker() {
            report.samples = 0;
        }
        report.peak = self.peak;
        report.spans = self.spans.clone();
        report.host_link = self.host_link.clone();
        Ok(report)
    }

    /// Sums up all that a commit needs. Returns the gradients that belong to other workers, not yet rounded to
    /// their parameters' dtype.
    pub(crate) fn sum_up(
        &mut self,
        whole: &Arc<Whole>,
        collective: Option<RankSum>,
    ) -> Result<Vec<TiedGradient>> {
        let Some(attempt) = &mut self.attempt else { return Ok(Vec::new()) };
        attempt.sum_up(whole, self.number, collective.as_ref())?;
        let mut outgoing = Vec::new();
        for (at, variable) in self.variables.trained().enumerate() {
            // Taken out of the sums: the commit would put the gradient into the copy, but only the owner gets it.
            if !self.variables.owns(variable)
                && let Some(gradient) = attempt.total.take(at)
            {
                outgoing.push((variable.owner, variable.name.clone(), gradient));
            }
        }
        Ok(outgoing)
    }

    /// Adds gradients of copies, grouped by the copies' workers, to the owner's gradients. Then casts the sums.
    pub(crate) fn join_and_cast(&mut self, arriving: Vec<NamedGradients>) -> Result<()> {
        let Some(attempt) = &mut self.attempt else { return Ok(()) };
        if !arriving.is_empty() {
            let names = self.variables.trained().enumerate().map(|(at, v)| (v.name.as_str(), at));
            let places: HashMap<&str, usize> = names.collect();
            // Adds one worker's gradients after the other's, so that at most one copy of all gradients is beside
            // the owner's.
            for copies in arriving {
                let placed = copies.into_iter();
                let placed = placed.filter_map(|(name, g)| Some((*places.get(name.as_str())?, g)));
                attempt.add(placed.collect())?;
            }
        }
        attempt.cast()
    }

    /// Fails if a prepared gradient is not finite and the policy refuses that.
    pub(crate) fn check_finite(&self) -> Result<()> {
        self.attempt.as_ref().map_or(Ok(()), |attempt| attempt.check_finite(self.site.non_finite))
    }

    /// Takes out the layers' statistics, and assigns them to these variables of another worker.
    pub(crate) fn hand_statistics(
        &mut self,
        twins: &[(String, Tensor)],
    ) -> Result<Option<Pending>> {
        let Some(attempt) = &mut self.attempt else { return Ok(None) };
        let own = self.variables.all().map(|v| (v.tensor.data_ptr(), v.name.as_str()));
        let own: HashMap<_, &str> = own.collect();
        let twins: HashMap<&str, &Tensor> = twins.iter().map(|(n, t)| (n.as_str(), t)).collect();
        // Taken out: otherwise this worker would also apply them to the other worker's variables.
        let mut statistics = std::mem::take(&mut attempt.undo.statistics);
        statistics.hand_to(|tensor| {
            let name = own.get(&tensor.data_ptr())?;
            twins.get(name).map(|twin| twin.shallow_clone())
        })?;
        Ok(Some(statistics))
    }

    /// Adds the statistics of the same layers in other replicas.
    pub(crate) fn join_statistics(&mut self, others: Vec<Pending>) -> Result<()> {
        let Some(attempt) = &mut self.attempt else { return Ok(()) };
        attempt.undo.statistics.pool()?;
        others.into_iter().for_each(|other| attempt.undo.statistics.extend(other));
        Ok(())
    }

    /// Commits the step. Allocates nothing.
    pub(crate) fn commit(&mut self) -> Result<()> {
        self.updated = 0;
        self.attempt.take().map_or(Ok(()), |mut attempt| attempt.commit())
    }

    /// Restores the state before the mini-batch under way.
    pub(crate) fn undo(&mut self) -> Result<()> {
        if let Some((run, undo)) = self.open.take() {
            // Drops the graphs first, because restoring may need their memory.
            drop(run);
            undo.run()?;
        }
        self.attempt.take().map_or(Ok(()), |attempt| attempt.undo.run())
    }

    /// Detaches the attempt, so that it can wait for later mini-batches of its step.
    pub(crate) fn detach(&mut self) -> Result<()> {
        let Some(attempt) = &mut self.attempt else { return Ok(()) };
        let both = |window: &&StoreAttempt| window.samples() > 0 && attempt.samples() > 0;
        let window = self.window.as_ref().filter(both);
        attempt.detach(window)
    }

    /// Adds the attempt to the accumulation window.
    pub(crate) fn keep(&mut self) -> Result<()> {
        match (&mut self.window, self.attempt.take()) {
            // A mini-batch without a sample for this replica has no sums to add to, and no loss whose terms
            // others would have to match.
            (Some(window), Some(attempt)) if window.samples() > 0 && attempt.samples() > 0 => {
                window.extend(attempt)
            }
            (Some(window), attempt) if window.samples() > 0 || attempt.is_none() => Ok(()),
            (_, attempt) => {
                self.window = attempt;
                Ok(())
            }
        }
    }

    /// Makes the accumulation window the current attempt.
    pub(crate) fn reopen(&mut self) {
        self.attempt = self.window.take();
    }

    /// Fails if other parameters are trained than when the accumulation window was opened.
    pub(crate) fn check_trained(&self) -> Result<()> {
        self.window.as_ref().map_or(Ok(()), |window| window.check_trained())
    }
}
