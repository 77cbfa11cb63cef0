//! How a mini-batch is cut: as given, or by an automatic size, again and smaller where memory ran
//! out in one of the stages.

use std::ops::Range;

use super::Pipeline;
use crate::auto::{Goal, Kind, Sizes, Story, Together, Use};
use crate::batch::Batch;
use crate::{Result, Size, split};

/// The automatic sizes of a pipeline, by what they strive for.
#[derive(Debug)]
pub(super) struct PipelineSizes {
    fastest: Sizes,
    largest: Sizes,
}

impl Default for PipelineSizes {
    fn default() -> Self {
        Self { fastest: Sizes::new(Goal::Fastest), largest: Sizes::new(Goal::Largest) }
    }
}

impl PipelineSizes {
    fn of(&mut self, size: Size) -> &mut Sizes {
        if size == Size::Largest { &mut self.largest } else { &mut self.fastest }
    }
}

impl Pipeline {
    /// Cuts the samples and calls `run`, until memory suffices everywhere.
    pub(super) fn sized<T>(
        &mut self,
        size: Size,
        used: Use,
        batch: &impl Batch,
        samples: usize,
        mut run: impl FnMut(&mut Self, &[Range<usize>]) -> Result<T>,
    ) -> Result<(T, Story)> {
        if let Some(ranges) = size.cut(samples)? {
            let ranges = self.ranks.dealt(ranges, size)?;
            return Ok((run(self, &ranges)?, Story::default()));
        }
        let kind = Kind::of(used, batch);
        let (mut story, devices) = (Story::default(), self.devices.len());
        loop {
            let memories = Together::now(self.devices.iter().map(|device| (device.memory(), 0)))?;
            let mut sizer = self.sizes.of(size).take(&kind, || vec![0; devices]);
            let agree = self.ranks.smallest();
            let ended = memories.try_size(&mut sizer, samples, &mut story, agree, |size| {
                let ranges = split::by_size(samples, size)?;
                let ranges = self.ranks.dealt(ranges, Size::Fixed(size))?;
                Ok((run(self, &ranges)?, Vec::new()))
            });
            self.sizes.of(size).put(kind.clone(), sizer);
            if let Some(value) = ended? {
                return Ok((value, story));
            }
        }
    }
}
