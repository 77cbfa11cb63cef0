//! Pairs of numbers a channel, one pair a micro-batch: a few at a time they become one tensor.

use tch::Tensor;

use crate::Result;

/// So many pairs are put together at once: more would be more memory, fewer more kernels.
pub(crate) const PAIRS: usize = 16;

/// What micro-batches have brought, each two tensors of one number a channel.
#[derive(Debug, Default)]
pub(crate) struct ChannelPairs(Vec<Tensor>);

impl ChannelPairs {
    /// The one pair that is in a tensor of 2 × channels.
    pub(crate) fn of(both: &Tensor) -> Result<Self> {
        Ok(Self(both.f_unbind(0)?))
    }

    pub(crate) fn push(&mut self, pair: [Tensor; 2]) {
        self.0.extend(pair);
    }

    /// All of them in one tensor, pairs × 2 × channels.
    pub(crate) fn stacked(&self) -> Result<Tensor> {
        let channels = self.0[0].size1()?;
        Ok(Tensor::f_cat(&self.0, 0)?.f_view([-1, 2, channels])?)
    }
}

/// The sum of all pairs so far.
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

    /// All in one, 2 × channels; of one pair at least.
    pub(crate) fn total(&self) -> Result<Tensor> {
        let all = self.0.stacked()?;
        Ok(all.f_sum_dim_intlist(0_i64, false, all.kind())?)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.0.is_empty()
    }
}
