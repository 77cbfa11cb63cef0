//! Pairs of numbers per channel, one pair for each micro-batch, which are combined several at a time.

use tch::Tensor;

use crate::Result;

/// Number of pairs that are combined at once: more would take more memory, fewer would take more kernels.
pub(crate) const PAIRS: usize = 16;

/// Pairs of micro-batches, each two tensors of one number per channel.
#[derive(Debug, Default)]
pub(crate) struct ChannelPairs(Vec<Tensor>);

impl ChannelPairs {
    /// Splits a tensor of 2 × channels into one pair.
    pub(crate) fn of(both: &Tensor) -> Result<Self> {
        Ok(Self(both.f_unbind(0)?))
    }

    pub(crate) fn push(&mut self, pair: [Tensor; 2]) {
        self.0.extend(pair);
    }

    /// Returns all pairs in one tensor of pairs × 2 × channels.
    pub(crate) fn stacked(&self) -> Result<Tensor> {
        let channels = self.0[0].size1()?;
        Ok(Tensor::f_cat(&self.0, 0)?.f_view([-1, 2, channels])?)
    }
}

/// Running sum of pairs.
#[derive(Debug, Default)]
pub(crate) struct PairSum(ChannelPairs);

impl PairSum {
    pub(crate) fn add(&mut self, pair: [Tensor; 2]) -> Result<()> {
        if self.0.0.len() == 2 * PAIRS {
            self.0 = ChannelPairs::of(&self.total()?)?;
        }
        self.0.push(pair);
        Ok(())
    }

    /// Returns the sum, 2 × channels; there must be at least one pair.
    pub(crate) fn total(&self) -> Result<Tensor> {
        let all = self.0.stacked()?;
        Ok(all.f_sum_dim_intlist(0_i64, false, all.kind())?)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.0.is_empty()
    }
}
