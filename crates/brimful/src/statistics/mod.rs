//! Running statistics of BatchNorm layers, which change once per committed step.
//!
//! During a step, the BatchNorm layers that run on its thread ask here for the destination of their statistics. A
//! *deferred* layer gets a row of its own for each micro-batch: libtorch writes the micro-batch's mean and
//! variance there as "running statistics" of momentum one, at no extra cost. The rows of many layers at once are
//! pooled into the mini-batch's statistics. At the step's end, the running statistics move once towards those of
//! the mini-batch. A *per-micro-batch* layer moves its running statistics at once, and their earlier values are
//! kept until the step has succeeded. An *exact* layer sees all micro-batches before it normalises the first: it
//! adds the statistics of the whole mini-batch at once.

mod channel_pairs;
mod graphs;
mod pool;
mod ranks;
mod running;
mod whole_batch;

use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

use brimful_torch::foreach;
use brimful_torch::touched::untold;
use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::ranks::RankSum;
pub(crate) use channel_pairs::PairSum;
pub(crate) use graphs::GraphStatistics;
use pool::Seen;
pub(crate) use ranks::ReportedLayer;
use running::Target;
pub(crate) use running::{Momentum, Running};
pub(crate) use whole_batch::{WholeBatch, WholeStatistics};

thread_local! {
    static STEP: RefCell<Option<Pending>> = const { RefCell::new(None) };
}

/// Changes of running statistics during a step, so far.
#[derive(Debug, Default)]
pub(crate) struct Pending {
    /// True if this pass will run a second time, so that its statistics must not count.
    rehearsal: bool,
    deferred: HashMap<u64, Seen>,
    rows: pool::RowSpace,
    /// Layers whose statistics were changed in place, with their earlier values.
    changed: HashMap<u64, (Running, Vec<Tensor>)>,
}

/// Guard that collects the reports of this thread's layers. The state of an outer step is saved, and restored when
/// the guard is dropped, even after a panic.
#[derive(Debug)]
#[must_use = "layers report until the guard is dropped"]
pub(crate) struct Collecting {
    outer: Option<Pending>,
}

impl Collecting {
    /// Begins to collect; a rehearsal's statistics do not count, because the pass will run a second time.
    pub(crate) fn begin(rehearsal: bool) -> Self {
        Self::after(Pending { rehearsal, ..Pending::default() })
    }

    /// Continues to collect, after earlier reports.
    pub(crate) fn after(earlier: Pending) -> Self {
        Self { outer: STEP.replace(Some(earlier)) }
    }

    /// Ends the collection, and returns the reports.
    pub(crate) fn end(self) -> Pending {
        STEP.take().unwrap_or_default()
    }
}

impl Drop for Collecting {
    fn drop(&mut self) {
        STEP.set(self.outer.take());
    }
}

impl Pending {
    /// Returns empty rows for the layers that have reported to the current step.
    pub(crate) fn for_the_same_layers() -> Result<Self> {
        let mut new = Self::default();
        STEP.with_borrow(|step| {
            for seen in step.iter().flat_map(|step| step.deferred.values()) {
                let mut twin = Seen::new(seen.running.share());
                twin.rows_in(&mut new.rows)?;
                new.deferred.insert(twin.running.id, twin);
            }
            Ok(new)
        })
    }

    /// Pools all rows so far, so that they can be added to an earlier part of the step.
    pub(crate) fn pool(&mut self) -> Result<()> {
        pool::pool_all(self.deferred.values_mut())
    }

    /// Pools all rows and hands them to the layers of another replica of the model; `twin` maps this replica's
    /// variables to those of the other replica.
    pub(crate) fn hand_to(&mut self, twin: impl Fn(&Tensor) -> Option<Tensor>) -> Result<()> {
        self.pool()?;
        self.deferred.values_mut().try_for_each(|seen| seen.hand_to(&twin))
    }

    /// Adds the pooled statistics of a later part of the step, or of another replica.
    pub(crate) fn extend(&mut self, later: Self) {
        // Layers of different replicas have different ids. They are matched by the first replica's variables, to
        // which `hand_to` has moved their statistics.
        let known = self.deferred.iter().map(|(id, seen)| (seen.running.mean.data_ptr(), *id));
        let known: HashMap<_, u64> = known.collect();
        for (id, seen) in later.deferred {
            let id = known.get(&seen.running.mean.data_ptr()).copied().unwrap_or(id);
            match self.deferred.entry(id) {
                Entry::Occupied(mut mine) => mine.get_mut().extend(seen),
                Entry::Vacant(place) => drop(place.insert(seen)),
            }
        }
        for (id, change) in later.changed {
            // A rollback restores the values before the first part.
            self.changed.entry(id).or_insert(change);
        }
    }

    /// Returns whether results depend on the cut, because some layer normalised by a micro-batch's own statistics.
    pub(crate) fn depends_on_cut(&self) -> bool {
        !self.changed.is_empty() || self.deferred.values().any(|seen| !seen.is_of_whole)
    }

    /// Returns whether a layer with this running mean or variance has reported.
    pub(crate) fn knows(&self, statistic: &Tensor) -> bool {
        let deferred = self.deferred.values().map(|seen| &seen.running);
        let mut all = deferred.chain(self.changed.values().map(|(running, ..)| running));
        all.any(|running| same(&running.mean, statistic) || same(&running.variance, statistic))
    }

    /// Computes the new running statistics, without changing the old ones.
    pub(crate) fn prepare(&mut self) -> Result<Moved> {
        if self.deferred.is_empty() {
            return Ok(Moved::default());
        }
        let mut moved = Moved::default();
        pool::moved(self.deferred.values_mut(), |running, values| moved.push(running, values))?;
        Ok(moved)
    }

    /// Restores all statistics to their values before the step.
    pub(crate) fn undo(self) -> Result<()> {
        let mut moved = Moved::default();
        for (running, before) in self.changed.into_values() {
            moved.push(&running, before);
        }
        moved.apply()
    }

    /// Returns the next rows of a layer, for the mean and variance of `count` values.
    fn next_rows(&mut self, running: &Running, count: i64) -> Result<(Tensor, Tensor)> {
        if self.deferred.get(&running.id).is_some_and(Seen::is_full) {
            // The layers fill up together, so the first to be full pools them all.
            pool::pool_all(self.deferred.values_mut().filter(|seen| seen.is_full()))?;
        }
        let seen = self.deferred.entry(running.id).or_insert_with(|| Seen::new(running.share()));
        seen.next(count, &mut self.rows)
    }

    fn seen(&mut self, running: &Running) -> &mut Seen {
        self.deferred.entry(running.id).or_insert_with(|| Seen::new(running.share()))
    }
}

fn same(a: &Tensor, b: &Tensor) -> bool {
    a.data_ptr() == b.data_ptr()
}

/// Returns the destination for a layer that moves its statistics at every micro-batch.
pub(crate) fn at_once(running: &Running) -> Result<Target> {
    with_step(running, |pending| {
        if let Entry::Vacant(place) = pending.changed.entry(running.id) {
            let before = running.all().map(Tensor::f_detach_copy).collect::<Result<_, _>>()?;
            place.insert((running.share(), before));
        }
        running.whole()
    })
}

/// Returns the destination for a deferred layer's statistics of `input`, whose mean is over `count` values.
pub(crate) fn deferred(running: &Running, input: &Tensor, count: i64) -> Result<Target> {
    with_step(running, |pending| {
        let (mean, variance) = pending.next_rows(running, count)?;
        if count > 1 {
            return Ok(Some((mean, variance, 1.0)));
        }
        // One value has no unbiased variance: libtorch would write a NaN. Written through `data`: the rows of
        // other layers are in the same storage, and autograd would count them as changed too.
        mean.f_data()?.f_copy_(&input.f_detach()?.f_reshape([-1_i64])?)?;
        let _zero = variance.f_data()?.f_zero_()?;
        Ok(None)
    })
}

/// Returns whether a step is running on this thread.
pub(crate) fn in_a_step() -> bool {
    STEP.with_borrow(Option::is_some)
}

/// Returns the destination that `f` takes from the current step. Without a step, the destination is the running
/// statistics. A rehearsal has no destination.
fn with_step(running: &Running, f: impl FnOnce(&mut Pending) -> Result<Target>) -> Result<Target> {
    STEP.with_borrow_mut(|step| match step {
        None => running.whole(),
        Some(pending) if pending.rehearsal => Ok(None),
        // Untracked, because the layer's recorded operations must not include the bookkeeping of rows.
        Some(pending) => untold(|| f(pending)),
    })
}

/// Running statistics and their new values.
#[derive(Debug, Default)]
pub(crate) struct Moved {
    running: Vec<Tensor>,
    values: Vec<Tensor>,
}

impl Moved {
    fn push(&mut self, running: &Running, values: Vec<Tensor>) {
        self.running.extend(running.all().map(Tensor::shallow_clone));
        self.values.extend(values);
    }

    /// Copies the new values. Allocates nothing, so it cannot fail half-way.
    pub(crate) fn apply(self) -> Result<()> {
        Ok(foreach::copy(&self.running, &self.values)?)
    }

    /// Returns the values that these statistics have on the rank at index `place`. All other ranks add zeros, so
    /// the values are exact to the last bit. `number` identifies the sum in the collective.
    pub(crate) fn as_at(
        place: usize,
        running: Vec<Tensor>,
        collective: &RankSum,
        number: usize,
    ) -> Result<Self> {
        if running.is_empty() {
            return Ok(Self::default());
        }
        let flat = |t: &Tensor| {
            t.f_detach()?.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double)?.f_reshape([-1_i64])
        };
        let rows = running.iter().map(flat).collect::<Result<Vec<_>, _>>()?;
        let mut all = Tensor::f_cat(&rows, 0)?;
        if !collective.is_at(place) {
            let _itself = all.f_zero_()?;
        }
        collective.sum_now(number, &all)?;
        let lengths: Vec<_> = rows.iter().map(|row| row.numel() as i64).collect();
        let parts = all.f_split_with_sizes(lengths, 0)?.into_iter().zip(&running);
        let value = |(part, like): (Tensor, &Tensor)| {
            part.f_view(&like.size()[..])?.f_to_kind(like.kind())?.f_to_device(like.device())
        };
        let values = parts.map(value).collect::<Result<_, _>>()?;
        Ok(Self { running, values })
    }

    pub(crate) fn extend(&mut self, other: Self) {
        self.running.extend(other.running);
        self.values.extend(other.values);
    }
}
