//! How the replicas' parts are cut: as given, or by an automatic size that all agree on, of all
//! ranks.

use std::ops::Range;

use super::Replicas;
use crate::auto::{Peaks, Story, Together};
use crate::crew::StageDevice;
use crate::micro::gradient_bytes;
use crate::micro::world::{Opening, agreed};
use crate::world::World;
use crate::{Result, Size};

impl<M: 'static> Replicas<M> {
    /// Calls `run` with a size until memory suffices on every device. It also gives each one's peak.
    pub(super) fn sized<T>(
        &mut self,
        world: Option<&World>,
        opening: &Opening,
        shares: &[Range<usize>],
        mut run: impl FnMut(&mut Self, Size) -> Result<(T, Peaks)>,
    ) -> Result<(T, Story)> {
        let longest = shares.iter().map(ExactSizeIterator::len).max().unwrap_or_default();
        if self.size.cut(longest.max(1))?.is_some() {
            return Ok((run(self, self.size)?.0, Story::default()));
        }
        let (kind, mut story) = (&opening.kind, Story::default());
        loop {
            // An optimizer's state will be with the first replica.
            let reserved = std::iter::once(self.reserved).chain(std::iter::repeat(0));
            let memories = self.devices.iter().map(StageDevice::memory).zip(reserved);
            let memories = Together::now(memories)?;
            let (store, replicas) = (&self.store, self.devices.len());
            let floors = || {
                let floor = if kind.is_training() { gradient_bytes(&store.variables_) } else { 0 };
                vec![floor; replicas]
            };
            let mut sizer = self.sizes.take(kind, floors);
            // Each shape is captured by itself, and keeps memory for that.
            sizer.even(self.replays);
            let agree = |size| match world {
                Some(world) => agreed(world, size, longest > 0),
                None => Ok(size),
            };
            let ended = memories.try_size(&mut sizer, longest, &mut story, agree, |size| {
                run(self, Size::Fixed(size))
            });
            self.sizes.put(kind.clone(), sizer);
            if let Some(value) = ended? {
                return Ok((value, story));
            }
        }
    }
}
