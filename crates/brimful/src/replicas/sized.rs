//! How the replicas' parts are cut: as given, or by an automatic size that all agree on, of all
//! ranks.

use super::Replicas;
use crate::auto::{Story, Together};
use crate::crew::StageDevice;
use crate::micro::gradient_bytes;
use crate::micro::world::{Opening, agreed};
use crate::{Result, Size};

impl<M: 'static> Replicas<M> {
    /// Calls `run` with a size until memory suffices on every device, where the longest part has so
    /// many samples.
    pub(super) fn sized<T>(
        &mut self,
        opening: &Opening,
        longest: usize,
        mut run: impl FnMut(&mut Self, Size) -> Result<T>,
    ) -> Result<(T, Story)> {
        if self.size.cut(longest.max(1))?.is_some() {
            return Ok((run(self, self.size)?, Story::default()));
        }
        let (kind, mut story, world) = (&opening.kind, Story::default(), self.world.clone());
        loop {
            let memories = Together::now(self.devices.iter().map(StageDevice::memory), 0)?;
            let (store, replicas) = (&self.store, self.devices.len());
            let floors = || {
                let floor = if kind.is_training() { gradient_bytes(&store.variables_) } else { 0 };
                vec![floor; replicas]
            };
            let mut sizer = self.sizes.take(kind, floors);
            let agree = |size| match &world {
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
