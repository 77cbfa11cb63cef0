//! How the replicas' parts are cut: as given, or by an automatic size that all agree on.

use super::Replicas;
use crate::auto::{Kind, Story, Together, Use};
use crate::batch::Batch;
use crate::micro::gradient_bytes;
use crate::{Result, Size};

impl<M: 'static> Replicas<M> {
    /// Calls `run` with a size until memory suffices on every device, where the longest part has so
    /// many samples.
    pub(super) fn sized<T>(
        &mut self,
        used: Use,
        batch: &impl Batch,
        longest: usize,
        mut run: impl FnMut(&mut Self, Size) -> Result<T>,
    ) -> Result<(T, Story)> {
        if self.size.cut(longest)?.is_some() {
            return Ok((run(self, self.size)?, Story::default()));
        }
        let (kind, mut story) = (Kind::of(used, batch), Story::default());
        loop {
            let memories = Together::now(self.devices.iter().map(|device| device.memory()))?;
            let (store, replicas) = (&self.store, self.devices.len());
            let floors = || {
                let floor = if kind.is_training() { gradient_bytes(&store.variables_) } else { 0 };
                vec![floor; replicas]
            };
            let mut sizer = self.sizes.take(&kind, floors);
            let ended = memories
                .try_size(&mut sizer, longest, &mut story, |size| run(self, Size::Fixed(size)));
            self.sizes.put(kind.clone(), sizer);
            if let Some(value) = ended? {
                return Ok((value, story));
            }
        }
    }
}
