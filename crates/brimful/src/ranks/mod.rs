//! What the ranks of a data-parallel step add up: gradients in buckets, and running statistics.
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

pub(crate) use buckets::{Buckets, summed_in};

use crate::Result;
use crate::world::{Summing, Turn};

/// One try at a step that these ranks take part in.
#[derive(Debug, Clone)]
pub(crate) struct RanksTurn {
    turn: Turn,
    everyone: Arc<[usize]>,
    /// What its sums are counted from, so that several can share a turn.
    base: u32,
}

impl RanksTurn {
    /// The part of a turn in which these ranks add up.
    pub(crate) fn of(turn: Turn, everyone: Arc<[usize]>, base: u32) -> Self {
        Self { turn, everyone, base }
    }

    /// Whether this rank is the one at this place among them.
    pub(crate) fn is_at(&self, place: usize) -> bool {
        self.everyone.get(place) == Some(&self.turn.rank())
    }

    /// Begins to add a tensor up; it is contiguous, and in the host's memory when the event is
    /// reached.
    fn sum(&self, number: usize, tensor: &Tensor, ready: Option<Event>) -> Result<Summing> {
        self.turn.sum(&self.everyone, self.base.wrapping_add(number as u32), tensor, ready)
    }

    /// Leaves in the tensor the sum of all ranks' tensors; `number` is none of a bucket's.
    pub(crate) fn sum_now(&self, number: usize, tensor: &Tensor) -> Result<()> {
        Ok(self.sum(number, tensor, None)?.wait()?)
    }
}
