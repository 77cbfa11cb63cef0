//! Maps the pipeline to the ranks of the world, and runs the calls that all ranks make together.

mod ties;

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};
pub(crate) use ties::{NamedGradients, Tie, TiedGradient, gather, have_changed, shared, spread};

use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::ranks::RankSum;
use crate::step::Team;
use crate::world::{Collective, World, WorldError};
use crate::{Error, Result};

/// Assignment of workers to ranks.
#[derive(Debug, Clone)]
pub(crate) struct Ranks {
    pub(crate) team: Team,
    /// Number of this rank's pipelines, each with all workers of `here`: several only in a world of one
    /// rank.
    pub(crate) replicas_here: usize,
    /// Rank of each worker of this rank's pipeline, in order.
    workers: Arc<[usize]>,
    /// Variables with copies in other ranks.
    pub(crate) ties: Arc<[Tie]>,
    /// Whether any variable has a copy, in this rank or another.
    pub(crate) has_ties: bool,
}

impl Ranks {
    /// Assigns workers to the ranks of one pipeline, in order; `devices` has each rank's number of devices.
    pub(crate) fn new(
        team: Team,
        replicas_here: usize,
        devices: &[usize],
        workers: usize,
    ) -> Result<Self> {
        let ranks = devices.len();
        let first = team.replica() * ranks;
        let each = (first..).zip(devices);
        let each = each.flat_map(|(rank, devices)| std::iter::repeat_n(rank, *devices));
        let all: Vec<usize> = each.take(workers).collect();
        // A rank without a worker would vote on steps that it has no part in, and hold none of the model.
        if all.last().is_none_or(|last| last + 1 < first + ranks) {
            return Err(WorldError::TooManyRanks { ranks, workers }.into());
        }
        let workers = all.into();
        Ok(Self { team, replicas_here, workers, ties: Arc::default(), has_ties: false })
    }

    /// Returns the ranks of a model that is in no pipeline.
    pub(crate) fn alone() -> Self {
        Self {
            team: Team::alone(),
            replicas_here: 1,
            workers: Arc::new([0]),
            ties: Arc::default(),
            has_ties: false,
        }
    }

    pub(crate) fn world(&self) -> &World {
        &self.team.world
    }

    /// Returns the index of this rank's pipeline in the world.
    pub(crate) fn replica(&self) -> usize {
        self.team.replica()
    }

    /// Returns the rank of a worker.
    pub(crate) fn of(&self, worker: usize) -> usize {
        self.workers[worker]
    }

    pub(crate) fn has(&self, worker: usize) -> bool {
        self.workers[worker] == self.world().rank()
    }

    /// Returns the workers of this rank.
    pub(crate) fn here(&self) -> Range<usize> {
        let first = self.workers.iter().position(|rank| *rank == self.world().rank()).unwrap_or(0);
        first..first + self.workers.iter().filter(|rank| **rank == self.world().rank()).count()
    }

    pub(crate) fn is_alone(&self) -> bool {
        self.team.is_alone()
    }

    /// Returns the ranks of this rank's pipeline.
    pub(crate) fn of_pipeline(&self) -> Range<usize> {
        let ranks = self.team.ranks_of_replica();
        self.replica() * ranks..(self.replica() + 1) * ranks
    }

    /// Returns the ranks of this worker in every pipeline.
    pub(crate) fn in_every_pipeline(&self, worker: usize) -> Vec<usize> {
        let ranks = self.team.ranks_of_replica();
        let at = self.of(worker) - self.replica() * ranks;
        (0..self.team.replicas).map(|replica| replica * ranks + at).collect()
    }

    /// Returns the collective that sums a worker's gradients with those of the same worker in all
    /// pipelines; none if there is only one pipeline.
    pub(crate) fn summing(&self, collective: &Collective, worker: usize) -> Option<RankSum> {
        // Numbers a worker's buckets from a base that no channel uses.
        let base = (worker as u32 + 1) << 16;
        let peers = || self.in_every_pipeline(worker).into();
        (self.team.replicas > 1).then(|| RankSum::of(collective.clone(), peers(), base))
    }

    /// Gathers the values of the first pipeline's workers, in order, on all ranks. If a rank fails, all ranks get
    /// its error. Values of other pipelines may differ in their last bits, so if each pipeline used its own
    /// values, the pipelines' models would drift apart.
    pub(crate) fn of_workers<T>(&self, what: &str, here: Result<Vec<T>>) -> Result<Vec<T>>
    where
        T: Serialize + for<'a> Deserialize<'a>,
    {
        let all = self.world().vote(what, here, Duration::ZERO)?;
        Ok(all.into_iter().take(self.team.ranks_of_replica()).flatten().collect())
    }

    /// Gathers all ranks' tensors, given by worker, on rank 0, in the order of their names. Replicas other than
    /// the first return their own tensors, which are equal. If a rank fails, all ranks get its error.
    pub(crate) fn gather(
        &self,
        here: Result<Vec<Vec<(String, Tensor)>>>,
    ) -> Result<Vec<(String, Tensor)>> {
        let here = here.map(|here| here.into_iter().flatten().collect::<Vec<_>>());
        let mut all = match self.replica() {
            0 => self.world().gather_told(here)?,
            // All ranks make the same call. Ranks of later replicas send nothing, because their tensors are equal.
            _ => {
                let nothing = here.as_ref().map(|_| Vec::new()).map_err(Error::clone);
                self.world().gather_told(nothing)?;
                here?
            }
        };
        all.sort_by(|(a, _), (b, _)| a.cmp(b));
        Ok(all)
    }

    /// Runs `f` on rank 0; all ranks get its error.
    pub(crate) fn on_first(&self, what: &str, f: impl FnOnce() -> Result<()>) -> Result<()> {
        let is_first = self.world().rank() == 0;
        self.all_or_none(what, || if is_first { f() } else { Ok(()) })
    }

    /// Runs `f`, this rank's part of a joint call, and returns its result if all ranks succeed. Otherwise, all
    /// ranks get the first error.
    pub(crate) fn all_or_none<T>(&self, what: &str, f: impl FnOnce() -> Result<T>) -> Result<T> {
        let mut own = None;
        self.together(what, |_| {
            own = Some(f()?);
            Ok(())
        })?;
        Ok(own.expect("all ranks went well, this one too"))
    }

    /// Returns the chosen names of each worker of this rank; `names` has the names of all workers. If a rank
    /// chooses none, all ranks fail; `none` makes the error from the number of names and the first one.
    pub(crate) fn chosen(
        &self,
        what: &str,
        names: &[Vec<String>],
        is_chosen: impl Fn(&str) -> bool,
        none: impl FnOnce(usize, String) -> Error,
    ) -> Result<Vec<Vec<String>>> {
        self.all_or_none(what, || {
            let of_worker = |names: &Vec<String>| -> Vec<String> {
                names.iter().filter(|name| is_chosen(name)).cloned().collect()
            };
            let mut chosen: Vec<_> = names.iter().map(of_worker).collect();
            if chosen.iter().all(Vec::is_empty) {
                // Counts each name once, because copies in other stages and replicas have their owner's name.
                let all: BTreeSet<&String> = names.iter().flatten().collect();
                let first = all.first().map(|name| (*name).clone()).unwrap_or_default();
                return Err(none(all.len(), first));
            }
            Ok(chosen.drain(self.here()).collect())
        })
    }

    /// Runs this rank's part of a new collective. All ranks get all results, or all get the first error.
    pub(crate) fn together<T>(
        &self,
        what: &str,
        f: impl FnOnce(&Collective) -> Result<T>,
    ) -> Result<Vec<T>>
    where
        T: Serialize + for<'a> Deserialize<'a>,
    {
        let start = Instant::now();
        let exchange = self.team.exchange()?;
        let result = f(&exchange.collective);
        exchange.vote(what, result, start.elapsed())
    }
}
