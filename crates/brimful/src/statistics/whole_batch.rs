//! The statistics of a whole mini-batch, taken before any of its micro-batches is normalised.

use tch::{Device, Kind, Tensor};

use super::pool::{Pooled, pooled_kind, put_together};
use super::{Running, STEP};
use crate::Result;
use crate::ranks::summed_in;

/// So many micro-batches are put together at once: more would be more memory, fewer more kernels.
const PARTS: usize = 16;

/// What all micro-batches so far come to. In f64, which for some numbers a channel costs nothing.
#[derive(Debug, Default)]
pub(crate) struct WholeBatch {
    parts: Vec<Pooled>,
}

impl WholeBatch {
    /// Counts a micro-batch, whose channels are its second dimension.
    pub(crate) fn add(&mut self, x: &Tensor) -> Result<()> {
        let x = x.f_detach()?;
        // Of halves a CPU gives statistics that are as coarse.
        let x = if x.device() == Device::Cpu { x.f_to_kind(summed_in(x.kind()))? } else { x };
        let count = x.numel() as i64 / x.size()[1];
        let (mean, variance) = x.f_batch_norm_update_stats(None::<Tensor>, None, 0.0)?;
        let squares = variance.f_to_kind(Kind::Double)?.f_mul_scalar(count as f64)?;
        self.parts.push(Pooled { count, mean: mean.f_to_kind(Kind::Double)?, squares });
        if self.parts.len() == PARTS { self.put_together() } else { Ok(()) }
    }

    /// The number of values a channel, their mean and their variance, for an input of this kind; moves
    /// the running statistics of the step under way towards them.
    pub(crate) fn settle(mut self, running: &Running, kind: Kind) -> Result<(i64, Tensor, Tensor)> {
        self.put_together()?;
        let whole = self.parts.remove(0);
        STEP.with_borrow_mut(|step| match step {
            Some(pending) => pending.seen(running)?.add(&whole),
            None => Ok(()),
        })?;
        let kind = pooled_kind(kind);
        let variance = whole.squares.f_div_scalar(whole.count as f64)?.f_to_kind(kind)?;
        Ok((whole.count, whole.mean.f_to_kind(kind)?, variance))
    }

    fn put_together(&mut self) -> Result<()> {
        let counts: Vec<i64> = self.parts.iter().map(|part| part.count).collect();
        let means: Vec<_> = self.parts.iter().map(|part| &part.mean).collect();
        let squares: Vec<_> = self.parts.iter().map(|part| &part.squares).collect();
        let whole =
            put_together(&counts, &Tensor::f_stack(&means, 0)?, &Tensor::f_stack(&squares, 0)?)?;
        self.parts = vec![whole];
        Ok(())
    }
}
