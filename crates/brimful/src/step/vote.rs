//! Ranks that take part in a step, their reports of an attempt, and their votes on it.
//!
//! A process alone votes for itself, and sends nothing.

use std::any::Any;
use std::panic;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::tally::{Counted, TermGroup, Totals};
use super::trained::Trained;
use crate::oom::{Caught, into_error, panic_message};
use crate::ranks::RankSum;
use crate::statistics::ReportedLayer;
use crate::world::{Collective, World};
use crate::{Error, Result};
use brimful_plan::bytes::Bytes;
use brimful_plan::schedule::{HostLinkUse, Span};

/// Ranks that take part in a step and make up replicas of the model. Each replica brings samples of its own; the
/// ranks of one replica bring the same samples.
#[derive(Debug, Clone)]
pub(crate) struct Team {
    pub(crate) world: World,
    pub(crate) replicas: usize,
}

impl Team {
    pub(crate) fn alone() -> Self {
        Self { world: World::alone(), replicas: 1 }
    }

    pub(crate) fn is_alone(&self) -> bool {
        self.world.size() == 1
    }

    pub(crate) fn ranks_of_replica(&self) -> usize {
        self.world.size() / self.replicas
    }

    /// Returns the index of this rank's replica.
    pub(crate) fn replica(&self) -> usize {
        self.world.rank() / self.ranks_of_replica()
    }

    /// Opens the channels of one attempt.
    pub(crate) fn exchange(&self) -> Result<Exchange> {
        Ok(Exchange { collective: self.world.collective()?, team: self.clone() })
    }
}

/// Channels over which the ranks communicate in one attempt at a step.
#[derive(Debug)]
pub(crate) struct Exchange {
    pub(crate) team: Team,
    pub(crate) collective: Collective,
}

impl Exchange {
    /// Returns the channel on which the gradients of this rank's only part are added to the gradients of all other
    /// replicas; `None` with one replica.
    pub(crate) fn summing(&self) -> Option<RankSum> {
        let everyone = || self.team.world.everyone();
        (self.team.replicas > 1).then(|| RankSum::of(self.collective.clone(), everyone(), 0))
    }

    /// Returns the results of all ranks; if any has failed, all ranks get the earliest error.
    pub(crate) fn vote<T>(&self, what: &str, result: Result<T>, at: Duration) -> Result<Vec<T>>
    where
        T: Serialize + for<'a> Deserialize<'a>,
    {
        if self.team.is_alone() {
            return Ok(vec![result?]);
        }
        let at = match &result {
            Ok(_) => at,
            Err(error) => {
                // Other ranks may wait for this rank's gradients or activations, which will not come.
                self.collective.stop();
                // A connection error follows from another rank's failure. Users should see that failure, so the
                // connection error gets the latest time.
                if matches!(error, Error::World(_)) { Duration::MAX } else { at }
            }
        };
        self.team.world.vote(what, result, at)
    }

    /// Votes success or failure of this attempt, without a report. It takes the place of the vote in which
    /// other ranks would report losses or failures.
    pub(crate) fn report(&self, done: Result<()>, start: Instant) -> Result<()> {
        let reported = done.map(|()| Vec::<PartReport>::new());
        self.vote(LOSS, reported, start.elapsed()).map(drop)
    }

    /// Votes failure of this attempt, and returns the earliest error of all ranks.
    pub(crate) fn report_failure(&self, failed: Failed, start: Instant) -> Error {
        let at = match failed.follows {
            true => Duration::MAX,
            false => failed.at.saturating_duration_since(start),
        };
        let error = into_error(*failed.cause);
        match self.vote::<Vec<PartReport>>(LOSS, Err(error.clone()), at) {
            Err(first) => first,
            Ok(_) => error,
        }
    }
}

/// Name of the vote in which ranks report losses.
pub(super) const LOSS: &str = "the loss";

/// Report of one part of an attempt, needed to commit all parts together.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct PartReport {
    pub(crate) counted: Counted,
    /// Groups of terms, each once.
    pub(crate) groups: Vec<TermGroup>,
    /// Samples that count: all parts of a pipeline run the same samples, so only the first part counts them.
    pub(crate) samples: usize,
    pub(crate) trained: Trained,
    /// For each parameter, whether there is a gradient.
    pub(crate) present: Vec<bool>,
    pub(crate) layers: Vec<ReportedLayer>,
    /// Names of statistics that this part has moved at every micro-batch.
    pub(crate) at_once: Vec<String>,
    /// Peak memory; then a pipeline's actions with their times.
    pub(crate) peak: Option<Bytes>,
    pub(crate) spans: Vec<Span>,
    pub(crate) host_link: HostLinkUse,
}

/// Sum of all parts.
#[derive(Debug, Default)]
pub(crate) struct Whole {
    pub(crate) totals: Totals,
    groups: Vec<TermGroup>,
    /// Samples of all replicas.
    pub(crate) samples: f64,
    parts: Vec<SeenPart>,
    /// Peak memory of each part of all ranks, in order.
    pub(crate) peaks: Vec<Option<Bytes>>,
    pub(crate) spans: Vec<Vec<Span>>,
    pub(crate) host_links: Vec<HostLinkUse>,
}

/// Gradients and statistics of one part, over all replicas.
#[derive(Debug, Clone, Default)]
pub(crate) struct SeenPart {
    /// Flag of each parameter: true if it has a gradient.
    pub(crate) present: Vec<bool>,
    pub(crate) layers: Vec<ReportedLayer>,
    /// Names of statistics that moved at every micro-batch, with the first replica that has moved them.
    pub(crate) at_once: Vec<(usize, Vec<String>)>,
}

impl Whole {
    /// Combines the reports of all ranks; every replica has the same parts.
    pub(super) fn of(reported: Vec<Vec<PartReport>>, replicas: usize) -> Result<Self> {
        let reported: Vec<PartReport> = reported.into_iter().flatten().collect();
        // Ranks are ordered by replica, so the reports are too: part p of every replica is at p, p + parts, …
        let parts = reported.len() / replicas.max(1);
        let mut whole = Self { parts: vec![SeenPart::default(); parts], ..Self::default() };
        if replicas > 1 {
            let trained: Vec<_> = reported.iter().map(|part| &part.trained).collect();
            Trained::check_replicas(&trained, parts)?;
        }
        let mut counted = Counted::default();
        // Every rank adds the same reports in the same order. So all compute the same factors to the last bit,
        // and copies of the model do not drift apart.
        for (at, reported) in reported.into_iter().enumerate() {
            whole.samples += reported.samples as f64;
            counted.add(reported.counted)?;
            // A replica without a sample has run no loss and has no groups.
            if whole.groups.is_empty() {
                whole.groups = reported.groups;
            }
            let part = &mut whole.parts[at % parts];
            let is_new = |name: &String| part.at_once.iter().all(|(_, all)| !all.contains(name));
            let new: Vec<String> = reported.at_once.into_iter().filter(is_new).collect();
            if !new.is_empty() {
                part.at_once.push((at / parts, new));
            }
            part.add(reported.present, reported.layers);
            whole.peaks.push(reported.peak);
            whole.spans.push(reported.spans);
            whole.host_links.push(reported.host_link);
        }
        whole.totals = counted.totals()?;
        Ok(whole)
    }

    /// Returns the factor of each group's gradients, which have been divided by `unit` so far.
    pub(crate) fn factors(&self, unit: f64) -> Vec<f64> {
        self.groups.iter().map(|group| self.totals.factor(*group, unit, self.samples)).collect()
    }

    /// Returns the gradients and statistics of this part, counted within a replica, over all replicas.
    pub(crate) fn part(&self, at: usize) -> &SeenPart {
        &self.parts[at]
    }
}

impl SeenPart {
    fn add(&mut self, present: Vec<bool>, layers: Vec<ReportedLayer>) {
        self.present.resize(present.len().max(self.present.len()), false);
        self.present.iter_mut().zip(present).for_each(|(any, has)| *any |= has);
        self.layers.extend(layers);
    }
}

/// A failed attempt, and the time of its failure, because the earliest of several failures is reported.
#[derive(Debug)]
pub(crate) struct Failed {
    pub(crate) at: Instant,
    pub(crate) cause: Box<Caught<Error>>,
    /// True if another part has failed before, perhaps in another rank.
    pub(crate) follows: bool,
}

impl Failed {
    /// Creates a failure with this error, at this time.
    pub(crate) fn at(at: Instant, error: Error) -> Self {
        Self { at, cause: Box::new(Caught::Error(error)), follows: false }
    }

    /// Creates a failure that an earlier failure has caused. The earlier failure is reported instead.
    pub(crate) fn stopped(error: Error) -> Self {
        Self { follows: true, ..error.into() }
    }
}

impl From<Caught<Error>> for Failed {
    fn from(cause: Caught<Error>) -> Self {
        Self { at: Instant::now(), cause: Box::new(cause), follows: false }
    }
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Caught::Error(error).into()
    }
}

/// A user's panic that resumes once everything is rolled back and all ranks have the report.
#[derive(Default)]
pub(crate) struct ParkedPanic(Option<Box<dyn Any + Send>>);

impl ParkedPanic {
    /// Keeps a panic, and reports its message to the other ranks.
    pub(crate) fn park(&mut self, failed: Failed) -> Failed {
        match *failed.cause {
            Caught::Panic(payload) => {
                let message = panic_message(&*payload);
                self.0 = Some(payload);
                let error = Error::Panicked { message };
                Failed { cause: Box::new(Caught::Error(error)), ..failed }
            }
            cause => Failed { cause: Box::new(cause), ..failed },
        }
    }

    /// Resumes the panic, if there was one.
    pub(crate) fn resume(self) {
        if let Some(payload) = self.0 {
            panic::resume_unwind(payload);
        }
    }
}
