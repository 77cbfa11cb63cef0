//! Sums of a data-parallel step over ranks: gradients in buckets, and running statistics.
//!
//! ```text
//!   backward of the last micro-batch   ── gradient complete ──►  its bucket ── full ──►  summed
//!   the world's thread                                        sends, receives and adds meanwhile
//! ```

mod buckets;
mod host_copier;

use std::sync::Arc;

use brimful_torch::stream::Event;
use tch::Tensor;

pub(crate) use buckets::Buckets;

use crate::Result;
use crate::world::{Collective, Summing};

/// Sums of one attempt of a step over these ranks.
#[derive(Debug, Clone)]
pub(crate) struct RankSum {
    collective: Collective,
    everyone: Arc<[usize]>,
    /// Channel number of the first sum, so that several `RankSum`s can share a collective.
    base: u32,
}

impl RankSum {
    /// Returns the part of a collective in which these ranks sum.
    pub(crate) fn of(collective: Collective, everyone: Arc<[usize]>, base: u32) -> Self {
        Self { collective, everyone, base }
    }

    /// Returns whether this rank is the one at index `place` among them.
    pub(crate) fn is_at(&self, place: usize) -> bool {
        self.everyone.get(place) == Some(&self.collective.rank())
    }

    /// Begins to sum a contiguous tensor in host memory, whose data are complete when the event is reached.
    fn sum(&self, number: usize, tensor: &Tensor, ready: Option<Event>) -> Result<Summing> {
        self.collective.sum(&self.everyone, self.base.wrapping_add(number as u32), tensor, ready)
    }

    /// Replaces the tensor by the sum over all ranks; `number` must not be that of a bucket.
    pub(crate) fn sum_now(&self, number: usize, tensor: &Tensor) -> Result<()> {
        Ok(self.sum(number, tensor, None)?.wait()?)
    }
}
