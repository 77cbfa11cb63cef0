//! Pools the statistics of micro-batches into those of all their values, many layers at once.
//!
//! With n values of mean μ and squared deviations q in each part, N in all:
//!
//! ```text
//!   M = Σ nμ / N          Q = Σ q + Σ n (μ − M)²          variance = Q / (N − 1)
//! ```
//!
//! Nothing is subtracted from a sum of squares, so nothing cancels. Layers whose parts have the same numbers of
//! values are pooled side by side. A network has only a few different numbers of values, so a step takes some
//! dozens of small kernels, not some dozens for each layer.

use brimful_torch::transfer;
use tch::{Device, Kind, Tensor};

use super::running::{Momentum, Running};
use crate::Result;

/// Rows of a layer before they are pooled: more rows would take more memory, fewer would take more kernels.
const ROWS: i64 = 16;
/// Smallest allocation for rows, as a number of elements. It serves many layers.
const MIN_SPACE: i64 = 1 << 16;

/// Statistics of one layer's inputs so far.
#[derive(Debug)]
pub(super) struct Seen {
    pub(super) running: Running,
    /// Memory for rows. The first ones, of which `counts` has the numbers of values, are filled and not pooled
    /// yet.
    rows: Option<Rows>,
    /// Number of values of each row.
    counts: Vec<i64>,
    pooled: Vec<Pooled>,
    /// True if the statistics are of whole mini-batches, not of micro-batches.
    pub(super) is_of_whole: bool,
}

/// Rows of a layer.
#[derive(Debug)]
pub(super) struct Rows {
    /// Means and unbiased variances, 2 × rows × channels.
    all: Tensor,
    /// Views of single rows: all means, then all variances.
    single: Vec<Tensor>,
}

/// Mean and variance of `count` values.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) count: i64,
    pub(super) mean: Tensor,
    pub(super) variance: Tensor,
}

/// Pooled rows: the number of values, their mean, and the sum of their squared deviations.
#[derive(Debug)]
pub(super) struct Pooled {
    pub(super) count: i64,
    pub(super) mean: Tensor,
    pub(super) squares: Tensor,
}

/// Properties that layers must share to be pooled side by side.
#[derive(Debug, PartialEq)]
struct Alike {
    counts: Vec<i64>,
    pooled: Vec<i64>,
    kind: Kind,
    device: Device,
    /// `None` if each layer counts its batches.
    momentum: Option<f64>,
}

impl Seen {
    pub(super) fn new(running: Running) -> Self {
        let (counts, pooled) = (Vec::new(), Vec::new());
        Self { running, rows: None, counts, pooled, is_of_whole: false }
    }

    /// Returns the layer's rows; takes them from this space if it has none yet.
    pub(super) fn rows_in(&mut self, space: &mut RowSpace) -> Result<&Rows> {
        if self.rows.is_none() {
            let all = space.take(&self.running.mean)?;
            let single = all.f_flatten(0, 1)?.f_unbind(0)?;
            self.rows = Some(Rows { all, single });
        }
        Ok(self.rows.as_ref().expect("they were made"))
    }

    pub(super) fn is_full(&self) -> bool {
        self.counts.len() as i64 == ROWS
    }

    /// Returns the next pair of rows, for the mean and variance of `count` values.
    pub(super) fn next(&mut self, count: i64, space: &mut RowSpace) -> Result<(Tensor, Tensor)> {
        let row = self.counts.len();
        let (means, variances) = self.rows_in(space)?.single.split_at(ROWS as usize);
        let pair = (means[row].shallow_clone(), variances[row].shallow_clone());
        self.counts.push(count);
        Ok(pair)
    }

    /// Returns the rows that are not pooled yet.
    pub(super) fn rows_so_far(&self) -> Vec<Row> {
        let single = self.rows.as_ref().map_or(&[][..], |rows| &rows.single);
        let (means, variances) = single.split_at(single.len() / 2);
        let rows = self.counts.iter().zip(means).zip(variances);
        let row = |((&count, mean), variance): ((&i64, &Tensor), &Tensor)| Row {
            count,
            mean: mean.shallow_clone(),
            variance: variance.shallow_clone(),
        };
        rows.map(row).collect()
    }

    /// Adds the statistics of a whole mini-batch.
    pub(super) fn add(&mut self, whole: Pooled) {
        self.is_of_whole = true;
        self.pooled.push(whole);
    }

    /// Adds later statistics, which have been pooled.
    pub(super) fn extend(&mut self, later: Self) {
        self.pooled.extend(later.pooled);
    }

    /// Transfers the pooled statistics to another replica's variables, on their device.
    pub(super) fn hand_to(&mut self, twin: impl Fn(&Tensor) -> Option<Tensor>) -> Result<()> {
        let Running { mean, variance, .. } = &self.running;
        let (Some(mean), Some(variance)) = (twin(mean), twin(variance)) else { return Ok(()) };
        for part in &mut self.pooled {
            part.mean = part.mean.f_to_device(mean.device())?;
            part.squares = part.squares.f_to_device(mean.device())?;
        }
        self.running.mean = mean;
        self.running.variance = variance;
        if let Momentum::Average(batches) = &mut self.running.momentum {
            *batches = twin(batches).unwrap_or_else(|| batches.shallow_clone());
        }
        Ok(())
    }

    /// Returns the pooled statistics as sums around the running mean, in host memory: the number of values, then
    /// each channel's sum, then each channel's sum of squares.
    pub(super) fn moments(&self) -> Result<Tensor> {
        let around = shift(&self.running)?;
        let Some(Pooled { count, mean, squares }) = self.pooled.first() else {
            return Ok(Tensor::f_zeros([1 + 2 * around.size1()?], (Kind::Double, Device::Cpu))?);
        };
        let host = |t: &Tensor| t.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double);
        let n = *count as f64;
        let off = host(mean)?.f_sub(&around)?;
        let sums = off.f_mul_scalar(n)?;
        let squares = host(squares)?.f_add(&off.f_mul(&sums)?)?;
        Ok(Tensor::f_cat(&[Tensor::f_from_slice(&[n])?, sums, squares], 0)?)
    }

    /// Sets the pooled statistics from [moments](Self::moments) that were summed over all ranks.
    pub(super) fn set_moments(&mut self, moments: &Tensor) -> Result<()> {
        let mean = &self.running.mean;
        let channels = mean.size1()?;
        let count = moments.f_double_value(&[0])?;
        let sums = moments.f_narrow(0, 1, channels)?;
        let off = sums.f_div_scalar(count)?;
        let squares = moments.f_narrow(0, 1 + channels, channels)?.f_sub(&off.f_mul(&sums)?)?;
        let kind = pooled_kind(mean.kind());
        let here = |t: Tensor| t.f_to_kind(kind)?.f_to_device(mean.device());
        let mean = here(shift(&self.running)?.f_add(&off)?)?;
        let squares = here(squares)?;
        self.counts.clear();
        self.pooled = vec![Pooled { count: count as i64, mean, squares }];
        Ok(())
    }

    /// Returns whether there is nothing left to pool.
    fn is_pooled(&self) -> bool {
        self.counts.is_empty() && self.pooled.len() <= 1
    }

    fn alike(&self) -> Alike {
        Alike {
            counts: self.counts.clone(),
            pooled: self.pooled.iter().map(|part| part.count).collect(),
            kind: self.running.mean.kind(),
            device: self.running.mean.device(),
            momentum: self.running.momentum.given(),
        }
    }
}

pub(super) fn pool_all<'a>(layers: impl Iterator<Item = &'a mut Seen>) -> Result<()> {
    for (alike, mut group) in grouped(layers.filter(|seen| !seen.is_pooled())) {
        let Pooled { count, mean, squares } = pool(&alike, &group)?;
        // Views of one tensor for all layers: no further kernel runs.
        let parts = of_each(&group, &mean)?.into_iter().zip(of_each(&group, &squares)?);
        for (seen, (mean, squares)) in group.iter_mut().zip(parts) {
            seen.pooled = vec![Pooled { count, mean, squares }];
            seen.counts.clear();
        }
    }
    Ok(())
}

/// Computes the new running statistics of every layer, which move once towards the statistics of the step, and
/// hands them to `push`.
pub(super) fn moved<'a>(
    layers: impl Iterator<Item = &'a mut Seen>,
    mut push: impl FnMut(&Running, Vec<Tensor>),
) -> Result<()> {
    for (alike, group) in grouped(layers) {
        let Pooled { count, mean, squares } = pool(&alike, &group)?;
        let parts = parts_of_the_way(&group, mean.kind())?;
        let toward = |running: Vec<&Tensor>, seen: &Tensor| {
            let running = Tensor::f_cat(&running, 0)?.f_to_kind(seen.kind())?;
            let moved = match alike.momentum {
                Some(momentum) => running.f_lerp(seen, momentum),
                None => running.f_lerp_tensor(seen, &parts),
            };
            moved?.f_to_kind(alike.kind)
        };
        let means = toward(group.iter().map(|seen| &seen.running.mean).collect(), &mean)?;
        let variances: Vec<_> = group.iter().map(|seen| &seen.running.variance).collect();
        let variances = match count {
            // A single value has no variance.
            1 => Tensor::f_cat(&variances, 0)?,
            _ => toward(variances, &squares.f_div_scalar((count - 1) as f64)?)?,
        };
        let parts = of_each(&group, &means)?.into_iter().zip(of_each(&group, &variances)?);
        for (seen, (mean, variance)) in group.iter().zip(parts) {
            let batches = seen.running.momentum.batches();
            let batches = batches.map(|batches| batches.f_add_scalar(1.0)).transpose()?;
            push(&seen.running, [mean, variance].into_iter().chain(batches).collect());
        }
    }
    Ok(())
}

/// Returns the running mean in f64, in host memory.
fn shift(running: &Running) -> Result<Tensor> {
    Ok(running.mean.f_detach()?.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double)?)
}

/// Splits a tensor of all layers' channels into each layer's part.
fn of_each(group: &[&mut Seen], whole: &Tensor) -> Result<Vec<Tensor>> {
    let channels = group.iter().map(|seen| seen.running.mean.size1());
    Ok(whole.f_split_with_sizes(channels.collect::<Result<Vec<_>, _>>()?, 0)?)
}

/// Returns the momentum of each channel, for layers whose statistics are averages of all batches.
fn parts_of_the_way(group: &[&mut Seen], kind: Kind) -> Result<Tensor> {
    let mut parts = Vec::new();
    for Running { mean, momentum, .. } in group.iter().map(|seen| &seen.running) {
        if let Some(batches) = momentum.batches() {
            let part = batches.f_to_kind(kind)?.f_add_scalar(1.0)?.f_reciprocal()?;
            parts.push(part.f_expand(mean.size(), false)?);
        }
    }
    if parts.is_empty() { Ok(Tensor::new()) } else { Ok(Tensor::f_cat(&parts, 0)?) }
}

fn grouped<'a>(layers: impl Iterator<Item = &'a mut Seen>) -> Vec<(Alike, Vec<&'a mut Seen>)> {
    let mut groups: Vec<(Alike, Vec<&'a mut Seen>)> = Vec::new();
    for seen in layers {
        let alike = seen.alike();
        match groups.iter_mut().find(|(key, _)| *key == alike) {
            Some((_, group)) => group.push(seen),
            None => groups.push((alike, vec![seen])),
        }
    }
    groups
}

/// Pools all parts, with the layers' channels side by side.
fn pool(alike: &Alike, group: &[&mut Seen]) -> Result<Pooled> {
    let kind = pooled_kind(alike.kind);
    let mut means = Vec::new();
    let mut squares = Vec::new();
    for index in 0..alike.pooled.len() {
        let side_by_side = |part: fn(&Pooled) -> &Tensor| {
            let parts: Vec<_> = group.iter().map(|seen| part(&seen.pooled[index])).collect();
            Tensor::f_cat(&parts, 0)?.f_unsqueeze(0)
        };
        means.push(side_by_side(|pooled| &pooled.mean)?);
        squares.push(side_by_side(|pooled| &pooled.squares)?);
    }
    if !alike.counts.is_empty() {
        let used = alike.counts.len() as i64;
        let rows = group.iter().filter_map(|seen| seen.rows.as_ref());
        let rows = rows.map(|rows| rows.all.f_narrow(1, 0, used));
        let rows = Tensor::f_cat(&rows.collect::<Result<Vec<_>, _>>()?, 2)?.f_to_kind(kind)?;
        means.push(rows.f_select(0, 0)?);
        // libtorch's variances are unbiased: times n − 1 they are the squared deviations.
        let less_one: Vec<_> = alike.counts.iter().map(|count| count - 1).collect();
        squares.push(times(&rows.f_select(0, 1)?, &less_one)?);
    }
    let counts = [&alike.pooled[..], &alike.counts[..]].concat();
    put_together(&counts, &Tensor::f_cat(&means, 0)?, &Tensor::f_cat(&squares, 0)?)
}

/// Combines all parts: rows of means and of squared deviations, each over `counts` values.
fn put_together(counts: &[i64], means: &Tensor, squares: &Tensor) -> Result<Pooled> {
    let kind = means.kind();
    let total: i64 = counts.iter().sum();
    let sum = |parts: &Tensor| parts.f_sum_dim_intlist(0_i64, false, kind);
    let mean = sum(&times(means, counts)?)?.f_div_scalar(total as f64)?;
    let between = sum(&times(&means.f_sub(&mean)?.f_square()?, counts)?)?;
    Ok(Pooled { count: total, mean, squares: sum(squares)?.f_add(&between)? })
}

/// Returns the dtype in which statistics of this dtype are pooled.
pub(super) fn pooled_kind(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}

/// Multiplies each row by its number of values.
fn times(rows: &Tensor, counts: &[i64]) -> Result<Tensor> {
    // Nearly always all counts are equal, and nothing has to be transferred to the device.
    match counts.first() {
        Some(first) if is_one_number(counts) => Ok(rows.f_mul_scalar(*first as f64)?),
        _ => Ok(rows.f_mul(&column(counts, rows.kind(), rows.device())?)?),
    }
}

/// Returns whether all counts are equal.
pub(super) fn is_one_number(counts: &[i64]) -> bool {
    counts.windows(2).all(|two| two[0] == two[1])
}

/// Returns the counts as a column on this device.
pub(super) fn column(counts: &[i64], kind: Kind, device: Device) -> Result<Tensor> {
    let counts: Vec<f64> = counts.iter().map(|count| *count as f64).collect();
    let counts = Tensor::f_from_slice(&counts)?.f_to_kind(kind)?.f_unsqueeze(1)?;
    match device {
        Device::Cpu => Ok(counts),
        // The host does not wait for a copy from pinned memory.
        device => Ok(transfer::send(&transfer::pin(&counts)?, device)?),
    }
}

/// Memory for rows, allocated in large pieces: small ones would take a kernel for each layer.
#[derive(Debug, Default)]
pub(super) struct RowSpace {
    pieces: Vec<(Tensor, i64)>,
}

impl RowSpace {
    /// Takes rows for statistics like these. They are zero, because a NaN that happens to be in memory would
    /// stay NaN, even times 0.
    fn take(&mut self, like: &Tensor) -> Result<Tensor> {
        let shape = [2, ROWS, like.size1()?];
        let length = shape.iter().product::<i64>();
        let fits = |(piece, used): &(Tensor, i64)| {
            let alike = piece.kind() == like.kind() && piece.device() == like.device();
            alike && used + length <= piece.numel() as i64
        };
        if !self.pieces.last().is_some_and(fits) {
            let options = (like.kind(), like.device());
            self.pieces.push((Tensor::f_zeros([length.max(MIN_SPACE)], options)?, 0));
        }
        let (piece, used) = self.pieces.last_mut().expect("one is there");
        let rows = piece.f_narrow(0, *used, length)?.f_view(shape)?;
        *used += length;
        Ok(rows)
    }
}
