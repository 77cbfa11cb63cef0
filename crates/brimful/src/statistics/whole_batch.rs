//! The statistics of a whole mini-batch, taken before any of its micro-batches is normalised.

use tch::{Device, Kind, Tensor};

use super::pool::{Pooled, Row, pooled_kind, put_together, times};
use super::{Running, STEP};
use crate::Result;
use crate::ranks::summed_in;

/// So many micro-batches are put together at once: more would be more memory, fewer more kernels.
const PARTS: usize = 16;

/// What all micro-batches so far come to. In f64, which for some numbers a channel costs nothing.
#[derive(Debug, Default)]
pub(crate) struct WholeBatch {
    whole: Option<Pooled>,
    /// Those that are not in it yet.
    rows: Vec<Row>,
}

impl WholeBatch {
    /// Counts a micro-batch, whose channels are its second dimension.
    pub(crate) fn add(&mut self, x: &Tensor) -> Result<()> {
        let x = x.f_detach()?;
        // Of halves a CPU gives statistics that are as coarse.
        let x = if x.device() == Device::Cpu { x.f_to_kind(summed_in(x.kind()))? } else { x };
        let count = x.numel() as i64 / x.size()[1];
        let (mean, variance) = x.f_batch_norm_update_stats(None::<Tensor>, None, 0.0)?;
        self.rows.push(Row { count, mean, variance });
        if self.rows.len() == PARTS {
            self.whole = Some(self.put_together()?);
            self.rows.clear();
        }
        Ok(())
    }

    /// The number of values a channel, their mean and their variance, for an input of this kind; moves
    /// the running statistics of the step under way towards them.
    pub(crate) fn settle(self, running: &Running, kind: Kind) -> Result<(i64, Tensor, Tensor)> {
        let whole = self.put_together()?;
        STEP.with_borrow_mut(|step| match step {
            Some(pending) => pending.seen(running)?.add(&whole),
            None => Ok(()),
        })?;
        // Rounded once, after all that could cancel.
        let kind = pooled_kind(kind);
        let variance = whole.squares.f_div_scalar(whole.count as f64)?.f_to_kind(kind)?;
        Ok((whole.count, whole.mean.f_to_kind(kind)?, variance))
    }

    /// All of them in one.
    fn put_together(&self) -> Result<Pooled> {
        let (mut counts, mut means, mut squares) = (Vec::new(), Vec::new(), Vec::new());
        if let Some(whole) = &self.whole {
            counts.push(whole.count);
            means.push(whole.mean.f_unsqueeze(0)?);
            squares.push(whole.squares.f_unsqueeze(0)?);
        }
        if !self.rows.is_empty() {
            let own: Vec<_> = self.rows.iter().map(|row| row.count).collect();
            let stacked = |part: fn(&Row) -> &Tensor| {
                let parts: Vec<_> = self.rows.iter().map(part).collect();
                Tensor::f_stack(&parts, 0)?.f_to_kind(Kind::Double)
            };
            means.push(stacked(|row| &row.mean)?);
            squares.push(times(&stacked(|row| &row.variance)?, &own)?);
            counts.extend(own);
        }
        match (&means[..], &squares[..]) {
            // Nothing to join, as nearly always: a network has many such layers, and a launch each would count.
            ([means], [squares]) => put_together(&counts, means, squares),
            _ => put_together(&counts, &Tensor::f_cat(&means, 0)?, &Tensor::f_cat(&squares, 0)?),
        }
    }
}
