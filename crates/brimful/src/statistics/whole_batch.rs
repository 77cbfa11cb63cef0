//! Statistics of a whole mini-batch, computed before any of its micro-batches is normalised.

use brimful_torch::batch_norm::moments;
use tch::{Device, Kind, Tensor};

use super::channel_pairs::{ChannelPairs, PAIRS};
use super::pool::{Pooled, column, is_one_number, pooled_kind};
use super::{Running, STEP};
use crate::Result;
use crate::batch::summed_in;

/// Statistics of all micro-batches so far: a mean and a variance for each.
#[derive(Debug, Default)]
pub(crate) struct WholeBatch {
    /// Number of values of each pair.
    counts: Vec<i64>,
    pairs: ChannelPairs,
}

/// Statistics that normalise a whole mini-batch.
#[derive(Debug)]
pub(crate) struct WholeStatistics {
    /// Number of values per channel.
    pub(crate) count: i64,
    pub(crate) mean: Tensor,
    pub(crate) variance: Tensor,
}

impl WholeBatch {
    /// Adds the statistics of a micro-batch, whose second dimension is the channels.
    pub(crate) fn add(&mut self, x: &Tensor) -> Result<()> {
        let x = x.f_detach()?;
        // A CPU would return the statistics of half-precision inputs in half precision.
        let x = if x.device() == Device::Cpu { x.f_to_kind(summed_in(x.kind()))? } else { x };
        let count = x.numel() as i64 / x.size()[1];
        let [mean, variance] = moments(&x)?;
        if self.counts.len() == PAIRS {
            let whole = self.put_together()?;
            self.pairs = ChannelPairs::of(&whole)?;
            self.counts = vec![self.counts.iter().sum()];
        }
        self.counts.push(count);
        self.pairs.push([mean, variance]);
        Ok(())
    }

    /// Combines all micro-batches. Returns the statistics that normalise an input of this dtype, and records
    /// them for the running statistics of the current step.
    pub(crate) fn finalize(self, running: &Running, kind: Kind) -> Result<WholeStatistics> {
        let count = self.counts.iter().sum();
        let whole = self.put_together()?;
        STEP.with_borrow_mut(|step| {
            let Some(pending) = step else { return Ok::<_, crate::Error>(()) };
            let (mean, variance) = (whole.f_select(0, 0)?, whole.f_select(0, 1)?);
            let squares = variance.f_mul_scalar(count as f64)?;
            pending.seen(running).add(Pooled { count, mean, squares });
            Ok(())
        })?;
        // Rounded only here, after all operations in which digits could cancel.
        let rounded = whole.f_to_kind(pooled_kind(kind))?;
        let (mean, variance) = (rounded.f_select(0, 0)?, rounded.f_select(0, 1)?);
        Ok(WholeStatistics { count, mean, variance })
    }

    /// Returns the mean and the variance of all values, 2 × channels: the variance of the parts' means is added
    /// to the mean of their variances. Computes in f64, which is cheap for a few numbers per channel, and in few
    /// operations, because a network has many such layers and each launch costs time.
    fn put_together(&self) -> Result<Tensor> {
        let parts = self.pairs.stacked()?.f_to_kind(Kind::Double)?;
        let (between, whole) = match is_one_number(&self.counts) {
            true => {
                let (between, whole) = parts.f_var_mean_dim(0_i64, false, false)?;
                (between.f_select(0, 0)?, whole)
            }
            false => self.weighted(&parts)?,
        };
        let _sum = whole.f_select(0, 1)?.f_add_(&between)?;
        Ok(whole)
    }

    /// Returns the variance of the parts' means, and the mean of their means and variances, for parts of
    /// unequal weight.
    fn weighted(&self, parts: &Tensor) -> Result<(Tensor, Tensor)> {
        let total: i64 = self.counts.iter().sum();
        let counts = column(&self.counts, Kind::Double, parts.device())?;
        let shares = counts.f_div_scalar(total as f64)?;
        let sum = |parts: &Tensor| parts.f_sum_dim_intlist(0_i64, false, Kind::Double);
        let whole = sum(&parts.f_mul(&shares.f_unsqueeze(2)?)?)?;
        let away = parts.f_select(1, 0)?.f_sub(&whole.f_select(0, 0)?)?;
        Ok((sum(&away.f_square()?.f_mul(&shares)?)?, whole))
    }
}
