//! A micro-batch size that all ranks agree on: where memory runs out on one, all go smaller.

use std::ops::Range;

use super::Opening;
use crate::auto::{Peaks, Story, Together};
use crate::memory::{Arena, Memory};
use crate::micro::{MicroBatcher, gradient_bytes};
use crate::world::World;
use crate::{Result, split};

impl MicroBatcher {
    /// Calls `run` with this rank's micro-batches until memory suffices on all ranks. It also gives
    /// this rank's peak.
    pub(super) fn sized_together<T>(
        &mut self,
        world: &World,
        opening: &Opening,
        mut run: impl FnMut(&mut Self, Vec<Range<usize>>) -> Result<(T, Peaks)>,
    ) -> Result<(T, Story)> {
        let samples = opening.own();
        let cut = |size: usize| match samples {
            0 => Ok(Vec::new()),
            _ => split::by_size(samples, size),
        };
        if let Some(given) = self.size.cut(samples.max(1))? {
            let ranges = if samples == 0 { Vec::new() } else { given };
            return Ok((run(self, ranges)?.0, Story::default()));
        }
        let memory = self.memory.get_or_insert_with(|| Memory::Arena(Arena::new("cpu"))).clone();
        let (kind, mut story) = (&opening.kind, Story::default());
        loop {
            let variables = &self.variables;
            let floor = || if kind.is_training() { gradient_bytes(variables) } else { 0 };
            let mut sizer = self.sizes.take(kind, || vec![floor()]);
            let ended =
                Together::now([(Some(memory.clone()), self.reserved)]).and_then(|memories| {
                    let agree = |size| agreed(world, size, samples > 0);
                    memories.try_size(&mut sizer, samples, &mut story, agree, |size| {
                        run(self, cut(size)?)
                    })
                });
            self.sizes.put(kind.clone(), sizer);
            if let Some(value) = ended? {
                return Ok((value, story));
            }
        }
    }
}

/// The smallest size of those that ranks with samples would take.
pub(crate) fn agreed(world: &World, size: usize, counts: bool) -> Result<usize> {
    let sizes = world.share("the micro-batch size", &counts.then_some(size))?;
    Ok(sizes.into_iter().flatten().min().unwrap_or(size))
}
