//! The pipeline's place in the world: which rank has which worker, and what ranks settle together.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::ties::Tie;
use super::worker::Worker;
use crate::batch::{self, Batch};
use crate::crew::Crew;
use crate::ranks::{RanksTurn, Trained};
use crate::world::{Turn, World, WorldError};
use crate::{Error, Result};

/// Which rank has which worker.
#[derive(Debug, Clone)]
pub(super) struct Ranks {
    pub(super) world: World,
    /// How many pipelines there are in the world, and which of them is this rank's.
    pub(super) replicas: usize,
    pub(super) replica: usize,
    /// The rank of each worker of this rank's pipeline, in order.
    workers: Arc<[usize]>,
    /// Variables with copies in other ranks.
    pub(super) ties: Arc<[Tie]>,
    /// Whether any has a copy, wherever.
    pub(super) has_ties: bool,
}

/// What ranks tell each other before a step.
#[derive(Debug, Serialize, Deserialize)]
struct Opening {
    batch: String,
    seed: u64,
    /// Whether a variable of the rank was changed that has copies.
    changed: bool,
}

impl Ranks {
    /// The ranks of one pipeline, which have so many devices each; those of the first come first.
    pub(super) fn new(
        world: World,
        replicas: usize,
        devices: &[usize],
        workers: usize,
    ) -> Result<Self> {
        let (ranks, replica) = (devices.len(), world.rank() / devices.len());
        let numbers = (replica * ranks..).zip(devices);
        let each = numbers.flat_map(|(rank, devices)| std::iter::repeat_n(rank, *devices));
        let all: Vec<usize> = each.take(workers).collect();
        if all.last().is_none_or(|last| last + 1 < (replica + 1) * ranks) {
            return Err(WorldError::TooManyRanks { ranks, workers }.into());
        }
        let (ties, has_ties) = (Arc::default(), false);
        Ok(Self { world, replicas, replica, workers: all.into(), ties, has_ties })
    }

    /// The rank that has a worker.
    pub(super) fn of(&self, worker: usize) -> usize {
        self.workers[worker]
    }

    pub(super) fn has(&self, worker: usize) -> bool {
        self.workers[worker] == self.world.rank()
    }

    /// The workers of this rank.
    pub(super) fn here(&self) -> Range<usize> {
        let first = self.workers.iter().position(|rank| *rank == self.world.rank()).unwrap_or(0);
        first..first + self.workers.iter().filter(|rank| **rank == self.world.rank()).count()
    }

    pub(super) fn is_alone(&self) -> bool {
        self.world.size() == 1
    }

    /// The ranks of this rank's pipeline.
    pub(super) fn of_pipeline(&self) -> Range<usize> {
        let ranks = self.world.size() / self.replicas;
        self.replica * ranks..(self.replica + 1) * ranks
    }

    /// The rank of that worker in every pipeline.
    pub(super) fn in_every_pipeline(&self, worker: usize) -> Vec<usize> {
        let ranks = self.world.size() / self.replicas;
        let at = self.of(worker) - self.replica * ranks;
        (0..self.replicas).map(|replica| replica * ranks + at).collect()
    }

    /// In which a worker's gradients are added up with those of the same worker in all pipelines;
    /// none where there is but one.
    pub(super) fn summing(&self, turn: &Turn, worker: usize) -> Option<RanksTurn> {
        // A worker's buckets are counted from a number that is none of a channel's.
        let base = (worker as u32 + 1) << 16;
        let peers = || self.in_every_pipeline(worker).into();
        (self.replicas > 1).then(|| RanksTurn::of(turn.clone(), peers(), base))
    }

    /// What the workers of this pipeline have, in order, from what those of this rank have.
    pub(super) fn of_workers<T>(&self, what: &str, here: Vec<T>) -> Result<Vec<T>>
    where
        T: Serialize + for<'a> Deserialize<'a>,
    {
        if self.is_alone() {
            return Ok(here);
        }
        let all = self.world.share(what, &here)?;
        let mine = self.of_pipeline();
        Ok(all.into_iter().skip(mine.start).take(mine.len()).flatten().collect())
    }

    /// Brings all ranks' tensors to rank 0, in the order of their names; replicas have the same.
    pub(super) fn gather(&self, own: Vec<(String, Tensor)>) -> Result<Vec<(String, Tensor)>> {
        if self.is_alone() {
            return Ok(own);
        }
        if self.replica > 0 {
            self.world.gather(Vec::new())?;
            return Ok(own);
        }
        let mut all = self.world.gather(own)?;
        all.sort_by(|(a, _), (b, _)| a.cmp(b));
        Ok(all)
    }

    /// The smallest size that a rank has decided on.
    pub(super) fn smallest(&self) -> impl FnOnce(usize) -> Result<usize> + use<> {
        let (world, alone) = (self.world.clone(), self.is_alone());
        move |own| {
            let all = if alone { vec![own] } else { world.share("micro-batch size", &own)? };
            Ok(all.into_iter().min().unwrap_or(own))
        }
    }

    /// Lets rank 0 do something; all ranks get its error.
    pub(super) fn on_first(&self, what: &str, f: impl FnOnce() -> Result<()>) -> Result<()> {
        let is_first = self.world.rank() == 0;
        self.together(what, |_| if is_first { f() } else { Ok(()) }).map(drop)
    }

    /// Makes sure that all ranks have the same mini-batch, and gives the first one's seed and whether
    /// a variable that has copies was changed on any of them.
    pub(super) fn open(
        &self,
        what: &str,
        batch: &[&dyn Described],
        seed: u64,
        changed: bool,
    ) -> Result<(u64, bool)> {
        if self.is_alone() {
            return Ok((seed, changed));
        }
        let batch = batch.iter().map(|batch| batch.described()).collect::<Vec<_>>().join("; ");
        let all = self.world.share(what, &Opening { batch, seed, changed })?;
        if all.iter().any(|opening| opening.batch != all[0].batch) {
            let found = all.into_iter().map(|opening| opening.batch).collect();
            return Err(WorldError::Differs { what: "the mini-batch".into(), found }.into());
        }
        Ok((all[0].seed, all.iter().any(|opening| opening.changed)))
    }

    /// Makes sure that all pipelines train the same parameters.
    pub(super) fn check_trained(&self, crew: &Crew<Worker>) -> Result<()> {
        if self.replicas == 1 {
            return Ok(());
        }
        let own = crew.all(|worker| {
            let trained = worker.variables.trained();
            Ok(Trained::of(trained.map(|variable| (variable.name.as_str(), &variable.tensor))))
        });
        let all = self.world.settle("what is trained", own, Duration::ZERO)?;
        let ranks = all.len() / self.replicas;
        let pipelines = all.chunks(ranks).map(|ranks| Trained::all(&ranks.concat()));
        // Each rank has what its pipeline has.
        let pipelines: Vec<Trained> =
            pipelines.flat_map(|whole| std::iter::repeat_n(whole, ranks)).collect();
        Ok(Trained::check_alike(pipelines.iter())?)
    }

    /// Does this rank's part of a turn of its own. All ranks get all results, or all get the error
    /// that came first.
    pub(super) fn together<T>(
        &self,
        what: &str,
        f: impl FnOnce(&Turn) -> Result<T>,
    ) -> Result<Vec<T>>
    where
        T: Serialize + for<'a> Deserialize<'a>,
    {
        let (start, turn) = (Instant::now(), self.world.turn()?);
        let result = f(&turn).map_err(|error| (start.elapsed(), error));
        self.settle(what, &turn, result)
    }

    /// The results of all ranks' parts of a turn; where one has failed, since the turn's beginning
    /// after so long, all get the error that came first.
    pub(super) fn settle<T>(
        &self,
        what: &str,
        turn: &Turn,
        result: Result<T, (Duration, Error)>,
    ) -> Result<Vec<T>>
    where
        T: Serialize + for<'a> Deserialize<'a>,
    {
        let at = match &result {
            Ok(_) => Duration::ZERO,
            Err((at, error)) => {
                turn.stop();
                // What follows from another rank's failure did not come first.
                if matches!(error, Error::World(_)) { Duration::MAX } else { *at }
            }
        };
        self.world.settle(what, result.map_err(|(_, error)| error), at)
    }
}

/// A batch in words that tell it from others.
pub(super) trait Described {
    fn described(&self) -> String;

    /// Of its tensors.
    fn devices(&self) -> Vec<Device>;
}

impl<B: Batch> Described for B {
    fn described(&self) -> String {
        let mut leaves = Vec::new();
        self.visit(&mut |leaf| leaves.push(described(leaf.tensor())));
        leaves.join(", ")
    }

    fn devices(&self) -> Vec<Device> {
        batch::devices(self)
    }
}

/// A tensor's kind and shape, and a number made from some of its values.
fn described(tensor: &Tensor) -> String {
    let (kind, shape) = (tensor.kind(), tensor.size());
    match sampled(tensor) {
        Some(values) => {
            let mut hasher = DefaultHasher::new();
            values.hash(&mut hasher);
            format!("{kind:?} {shape:?} #{:04x}", hasher.finish() & 0xffff)
        }
        None => format!("{kind:?} {shape:?}"),
    }
}

/// The bits of some values from all over a tensor, where reading them costs nothing.
fn sampled(tensor: &Tensor) -> Option<Vec<u64>> {
    const VALUES: i64 = 64;
    let length = tensor.numel() as i64;
    if tensor.device() != Device::Cpu || length == 0 {
        return None;
    }
    let places = Tensor::f_linspace(0, length - 1, VALUES.min(length), (Kind::Double, Device::Cpu));
    let places = places.ok()?.f_to_kind(Kind::Int64).ok()?;
    let values = tensor.f_detach().ok()?.f_take(&places).ok()?.f_to_kind(Kind::Double).ok()?;
    let values = Vec::<f64>::try_from(&values).ok()?;
    Some(values.into_iter().map(f64::to_bits).collect())
}
