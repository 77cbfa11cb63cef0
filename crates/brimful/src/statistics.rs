//! Running statistics that change once a step, or not at all.
//!
//! While a step is under way, the BatchNorm layers that run on its thread ask here where to put
//! what they have seen. A *deferred* layer gets a row of its own for each micro-batch: libtorch
//! writes the micro-batch's mean and variance there as "running statistics" of momentum one, at no
//! extra cost. At the step's end the rows are pooled into the mini-batch's statistics, and those
//! move the running ones, once. A *per-micro-batch* layer moves them at once, and what they were
//! before is kept until the step has succeeded.

use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

use tch::{Kind, Tensor};

use crate::Result;

/// A layer's running mean and variance, and how far one batch moves them.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) mean: Tensor,
    pub(crate) variance: Tensor,
    pub(crate) momentum: f64,
}

impl Running {
    fn share(&self) -> Self {
        Self {
            mean: self.mean.shallow_clone(),
            variance: self.variance.shallow_clone(),
            momentum: self.momentum,
        }
    }

    fn key(&self) -> usize {
        self.mean.data_ptr() as usize
    }
}

thread_local! {
    static STEP: RefCell<Option<Pending>> = const { RefCell::new(None) };
}

/// What a step has done to running statistics so far.
#[derive(Debug, Default)]
pub(crate) struct Pending {
    /// Rows to make room for.
    micro_batches: i64,
    /// A pass that will be run again, and whose statistics must not count twice.
    rehearsal: bool,
    deferred: HashMap<usize, Rows>,
    /// Layers that were changed in place, as they were before.
    changed: HashMap<usize, (Running, Tensor, Tensor)>,
}

/// Each micro-batch's mean and unbiased variance of one layer.
#[derive(Debug)]
struct Rows {
    running: Running,
    /// Of shape 2 × micro-batches × channels; more than one only where a layer runs more often
    /// than once a micro-batch, or a step has several mini-batches.
    slabs: Vec<Tensor>,
    free: i64,
    /// How many values each row's mean is over.
    counts: Vec<i64>,
}

impl Pending {
    /// Lets layers of this thread report here while `f` runs.
    pub(crate) fn collect<T>(
        micro_batches: usize,
        rehearsal: bool,
        f: impl FnOnce() -> T,
    ) -> (Self, T) {
        let micro_batches = i64::try_from(micro_batches).unwrap_or(1);
        let pending = Self { micro_batches, rehearsal, ..Self::default() };
        let outer = STEP.replace(Some(pending));
        let result = f();
        let pending = STEP.replace(outer).unwrap_or_default();
        (pending, result)
    }

    /// Adds a later part of the same step.
    pub(crate) fn extend(&mut self, later: Self) {
        for (key, rows) in later.deferred {
            match self.deferred.get_mut(&key) {
                Some(mine) => mine.extend(rows),
                None => drop(self.deferred.insert(key, rows)),
            }
        }
        for (key, change) in later.changed {
            self.changed.entry(key).or_insert(change);
        }
    }

    /// Whether a layer with this running mean has reported.
    pub(crate) fn knows(&self, running_mean: &Tensor) -> bool {
        let key = running_mean.data_ptr() as usize;
        self.deferred.contains_key(&key) || self.changed.contains_key(&key)
    }

    /// Computes where the running statistics go, without changing them.
    pub(crate) fn prepare(&self) -> Result<Moved> {
        self.deferred.values().map(Rows::moved).collect::<Result<_>>().map(Moved)
    }

    /// Puts everything back to what it was before the step.
    pub(crate) fn undo(self) -> Result<()> {
        Moved(self.changed.into_values().collect()).apply()
    }
}

/// Running statistics and the values that they are to have.
#[derive(Debug)]
pub(crate) struct Moved(Vec<(Running, Tensor, Tensor)>);

impl Moved {
    /// Gives them those values. Nothing is allocated, so nothing can fail half-way.
    pub(crate) fn apply(self) -> Result<()> {
        for (mut running, mean, variance) in self.0 {
            running.mean.f_copy_(&mean)?;
            running.variance.f_copy_(&variance)?;
        }
        Ok(())
    }
}

impl Rows {
    fn new(running: &Running) -> Self {
        Self { running: running.share(), slabs: Vec::new(), free: 0, counts: Vec::new() }
    }

    /// A fresh pair of rows for the mean and variance over `count` values.
    fn next(&mut self, capacity: i64, count: i64) -> Result<(Tensor, Tensor)> {
        if self.free == 0 {
            let mean = &self.running.mean;
            let shape = [2, capacity, mean.size1()?];
            self.slabs.push(Tensor::f_zeros(shape, (mean.kind(), mean.device()))?);
            self.free = capacity;
        }
        let slab = self.slabs.last().expect("one was just made");
        let row = slab.f_select(1, capacity - self.free)?;
        self.free -= 1;
        self.counts.push(count);
        Ok((row.f_select(0, 0)?, row.f_select(0, 1)?))
    }

    fn extend(&mut self, later: Self) {
        self.trim();
        self.slabs.extend(later.slabs);
        self.counts.extend(later.counts);
        self.free = later.free;
    }

    /// Leaves out the last slab's unused rows, so that another slab can follow.
    fn trim(&mut self) {
        if self.free > 0
            && let Some(last) = self.slabs.pop()
        {
            let used = last.size()[1] - self.free;
            self.slabs.push(last.narrow(1, 0, used));
            self.free = 0;
        }
    }

    /// The running statistics after the step: one movement towards the mini-batch's own.
    ///
    /// With n values of mean μ and unbiased variance v in each row, N in all:
    /// M = Σ nμ / N and V = (Σ (n − 1) v + Σ n (μ − M)²) / (N − 1). Nothing is subtracted from
    /// a sum of squares, so nothing cancels.
    fn moved(&self) -> Result<(Running, Tensor, Tensor)> {
        let kind = match self.running.mean.kind() {
            Kind::Double => Kind::Double,
            _ => Kind::Float,
        };
        let used = i64::try_from(self.counts.len()).unwrap_or(i64::MAX);
        let rows = Tensor::f_cat(&self.slabs, 1)?.f_narrow(1, 0, used)?.f_to_kind(kind)?;
        let (means, variances) = (rows.f_select(0, 0)?, rows.f_select(0, 1)?);
        let device = self.running.mean.device();
        let counts = Tensor::f_from_slice(&self.counts)?.f_to_kind(kind)?.f_to_device(device)?;
        let counts = counts.f_unsqueeze(1)?;
        let total = self.counts.iter().sum::<i64>();

        let over = |sum: Tensor, by: i64| sum.f_div_scalar(by as f64);
        let sum = |t: Tensor| t.f_sum_dim_intlist(0_i64, false, kind);
        let mean = over(sum(means.f_mul(&counts)?)?, total)?;
        let within = sum(variances.f_mul(&counts.f_sub_scalar(1.0)?)?)?;
        let between = sum(means.f_sub(&mean)?.f_square()?.f_mul(&counts)?)?;
        let variance = over(within.f_add(&between)?, total - 1)?;
        let mean = self.toward(&self.running.mean, &mean)?;
        let variance = self.toward(&self.running.variance, &variance)?;
        Ok((self.running.share(), mean, variance))
    }

    fn toward(&self, running: &Tensor, seen: &Tensor) -> Result<Tensor> {
        let kept = running.f_to_kind(seen.kind())?.f_mul_scalar(1.0 - self.running.momentum)?;
        Ok(kept.f_add(&seen.f_mul_scalar(self.running.momentum)?)?)
    }
}

/// Where a layer's statistics go: tensors to be moved by this much, or nowhere.
pub(crate) type Target = Option<(Tensor, Tensor, f64)>;

/// Where a layer that moves its statistics at every micro-batch puts them.
pub(crate) fn at_once(running: &Running) -> Result<Target> {
    with_step(running, |pending| {
        if let Entry::Vacant(place) = pending.changed.entry(running.key()) {
            let Running { mean, variance, .. } = running;
            place.insert((running.share(), mean.f_detach_copy()?, variance.f_detach_copy()?));
        }
        Ok(running.whole())
    })
}

/// Where a deferred layer puts the statistics of `input`, whose mean is over `count` values.
pub(crate) fn deferred(running: &Running, input: &Tensor, count: i64) -> Result<Target> {
    with_step(running, |pending| {
        let capacity = pending.micro_batches;
        let rows = pending.deferred.entry(running.key()).or_insert_with(|| Rows::new(running));
        let (mut mean, variance) = rows.next(capacity, count)?;
        if count > 1 {
            return Ok(Some((mean, variance, 1.0)));
        }
        // One value has no unbiased variance: libtorch would write a NaN. Its row stays zero.
        mean.f_copy_(&input.f_detach()?.f_reshape([-1_i64])?)?;
        Ok(None)
    })
}

impl Running {
    fn whole(&self) -> Target {
        let Self { mean, variance, momentum } = self.share();
        Some((mean, variance, momentum))
    }
}

/// Asks the step under way, if there is one and it counts.
fn with_step(running: &Running, f: impl FnOnce(&mut Pending) -> Result<Target>) -> Result<Target> {
    STEP.with_borrow_mut(|step| match step {
        None => Ok(running.whole()),
        Some(pending) if pending.rehearsal => Ok(None),
        Some(pending) => f(pending),
    })
}
