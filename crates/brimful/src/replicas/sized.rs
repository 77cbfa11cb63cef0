//! How the replicas' parts are cut: as given, or by an automatic size that all agree on, of all
//! ranks.

use super::Replicas;
use crate::auto::{Story, Together};
use crate::crew::StageDevice;
use crate::micro::gradient_bytes;
use crate::micro::world::Opening;
use crate::world::World;
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
        let (kind, mut story) = (&opening.kind, Story::default());
        let world = self.world.clone().unwrap_or_else(World::alone);
        let longest = world.share("the longest part", &longest)?.into_iter().max().unwrap_or(1);
        loop {
            let own = self.devices.iter().map(StageDevice::memory);
            let (memories, store) = (Together::in_world(own, 0, &world)?, &self.store);
            let floors = || {
                let floor = if kind.is_training() { gradient_bytes(&store.variables_) } else { 0 };
                vec![floor; memories.len()]
            };
            let mut sizer = self.sizes.take(kind, floors);
            let ended = memories
                .try_size(&mut sizer, longest, &mut story, |size| run(self, Size::Fixed(size)));
            self.sizes.put(kind.clone(), sizer);
            if let Some(value) = ended? {
                return Ok((value, story));
            }
        }
    }
}
