//! What becomes of a try: every part tells, all prepare, all vote, and then all commit or all undo.
//!
//! Alone or over ranks is one path: a world of one votes with itself.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::caught::{Failed, caught};
use super::tally::{Counted, TermGroup, Totals};
use super::trained::Trained;
use super::{Attempted, Engine};
use crate::bytes::Bytes;
use crate::ranks::RanksTurn;
use crate::schedule::{BusUse, Span};
use crate::statistics::ReportedLayer;
use crate::workers::into_error;
use crate::world::{Turn, World};
use crate::{Error, Result};

/// Who takes part in a step: ranks that make up replicas of the model. Every replica brings samples of
/// its own; the ranks of one replica bring the same.
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

    /// Which replica this rank is of.
    pub(crate) fn replica(&self) -> usize {
        self.world.rank() / self.ranks_of_replica()
    }

    /// Begins what ranks exchange in one try.
    pub(crate) fn exchange(&self) -> Result<Exchange> {
        Ok(Exchange { turn: self.world.turn()?, team: self.clone() })
    }
}

/// What the ranks exchange in one try at a step.
#[derive(Debug)]
pub(crate) struct Exchange {
    pub(crate) team: Team,
    pub(crate) turn: Turn,
}

impl Exchange {
    /// Where gradients of this rank's only part are added to those of all others; none where there
    /// is but one replica.
    pub(crate) fn summing(&self) -> Option<RanksTurn> {
        let everyone = || self.team.world.everyone();
        (self.team.replicas > 1).then(|| RanksTurn::of(self.turn.clone(), everyone(), 0))
    }

    /// The results of all ranks; where one has failed, all get the error that came first.
    pub(crate) fn vote<T>(&self, what: &str, result: Result<T>, at: Duration) -> Result<Vec<T>>
    where
        T: Serialize + for<'a> Deserialize<'a>,
    {
        let at = match &result {
            Ok(_) => at,
            Err(error) => {
                // Others may be waiting for gradients or activations of this rank, which will not come.
                self.turn.stop();
                // An error of the connection follows from another rank's failure, which is the one that
                // users are to see: so it is dated last.
                if matches!(error, Error::World(_)) { Duration::MAX } else { at }
            }
        };
        self.team.world.settle(what, result, at)
    }

    /// Tells the others that this rank's try has come so far, of which there is nothing to tell yet; or
    /// that it has come to nothing after all. It is the moment at which others tell of a try that has
    /// failed.
    pub(crate) fn report(&self, done: Result<()>, start: Instant) -> Result<()> {
        let told = done.map(|()| Vec::<PartReport>::new());
        self.vote(LOSS, told, start.elapsed()).map(drop)
    }

    /// Tells the others that this rank's try has failed, and gives the error that came first.
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

/// What ranks call the moment at which losses are told.
const LOSS: &str = "the loss";

/// What has to be known of one part of a try to commit it together with the others.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct PartReport {
    pub(crate) counted: Counted,
    /// Each once.
    pub(crate) groups: Vec<TermGroup>,
    /// Those that count: of the parts of a pipeline, which run the same ones, the first has them.
    pub(crate) samples: usize,
    pub(crate) trained: Trained,
    /// For each parameter, whether there is a gradient.
    pub(crate) present: Vec<bool>,
    pub(crate) layers: Vec<ReportedLayer>,
    /// The names of statistics that it has moved at every micro-batch.
    pub(crate) at_once: Vec<String>,
    /// The most memory in use, and a pipeline's actions with their times.
    pub(crate) peak: Option<Bytes>,
    pub(crate) spans: Vec<Span>,
    pub(crate) bus: BusUse,
}

/// What all parts come to.
#[derive(Debug, Default)]
pub(crate) struct Whole {
    pub(crate) totals: Totals,
    groups: Vec<TermGroup>,
    /// Of all replicas.
    pub(crate) samples: f64,
    parts: Vec<SeenPart>,
    /// Of all parts of all ranks, in order.
    pub(crate) peaks: Vec<Option<Bytes>>,
    pub(crate) spans: Vec<Vec<Span>>,
    pub(crate) buses: Vec<BusUse>,
}

/// What one part has seen in all replicas together.
#[derive(Debug, Clone, Default)]
pub(crate) struct SeenPart {
    /// Which parameters have got gradients.
    pub(crate) present: Vec<bool>,
    pub(crate) layers: Vec<ReportedLayer>,
    /// Names of statistics that were moved at every micro-batch, by the first replica that has moved them.
    pub(crate) at_once: Vec<(usize, Vec<String>)>,
}

impl Whole {
    /// What all ranks tell of so many replicas, each of which has the same parts.
    fn of(told: Vec<Vec<PartReport>>, replicas: usize) -> Result<Self> {
        let told: Vec<PartReport> = told.into_iter().flatten().collect();
        // Ranks are ordered by replica, so the reports are too: part p of every replica is at p, p + parts, …
        let parts = told.len() / replicas.max(1);
        let mut whole = Self { parts: vec![SeenPart::default(); parts], ..Self::default() };
        if replicas > 1 {
            let trained: Vec<_> = told.iter().map(|part| &part.trained).collect();
            Trained::check_replicas(&trained, parts)?;
        }
        let mut counted = Counted::default();
        // Every rank adds the same reports in the same order, so that all compute the same factors from
        // them to the last bit, and copies of the model do not drift apart.
        for (at, told) in told.into_iter().enumerate() {
            whole.samples += told.samples as f64;
            counted.add(told.counted)?;
            // A replica without a sample has run no loss, and knows no groups.
            if whole.groups.is_empty() {
                whole.groups = told.groups;
            }
            let part = &mut whole.parts[at % parts];
            let is_new = |name: &String| part.at_once.iter().all(|(_, all)| !all.contains(name));
            let new: Vec<String> = told.at_once.into_iter().filter(is_new).collect();
            if !new.is_empty() {
                part.at_once.push((at / parts, new));
            }
            part.add(told.present, told.layers);
            whole.peaks.push(told.peak);
            whole.spans.push(told.spans);
            whole.buses.push(told.bus);
        }
        whole.totals = counted.totals()?;
        Ok(whole)
    }

    /// What the gradients of each group, divided by `unit` until now, are to be multiplied with.
    pub(crate) fn factors(&self, unit: f64) -> Vec<f64> {
        self.groups.iter().map(|group| self.totals.factor(*group, unit, self.samples)).collect()
    }

    /// What this part, counted over the ranks of a replica, has seen in all of them.
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

/// Commits what was tried, here and on all ranks, or undoes it.
pub(crate) fn settle<E: Engine>(
    engine: &mut E,
    mut tried: E::Tried,
    exchange: &Exchange,
    start: Instant,
) -> Result<(E::Tried, Arc<Whole>)> {
    match agree(engine, &mut tried, exchange, start) {
        // From here on nothing may fail on one rank alone: the others commit at this moment.
        Ok(whole) => {
            tried.commit(engine)?;
            Ok((tried, whole))
        }
        Err(error) => {
            tried.undo(engine)?;
            Err(error)
        }
    }
}

/// All parts tell what they have, and prepare what all of it comes to; nothing is committed yet.
fn agree<E: Engine>(
    engine: &mut E,
    tried: &mut E::Tried,
    exchange: &Exchange,
    start: Instant,
) -> Result<Arc<Whole>> {
    // A rank that fails votes all the same, with its error: one that returned would leave the others
    // waiting. Hence `caught` and not `?`.
    let told = caught(|| tried.tell(engine, exchange));
    let told = exchange.vote(LOSS, told, start.elapsed())?;
    let whole = Arc::new(Whole::of(told, exchange.team.replicas)?);
    // Preparing needs memory and may fail on some ranks only, so there is a second vote after it.
    let prepared = caught(|| tried.prepare(engine, &whole, exchange));
    exchange.vote("the gradients", prepared, start.elapsed())?;
    Ok(whole)
}
