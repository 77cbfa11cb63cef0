//! How a mini-batch is cut: as given, or by an automatic size, again and smaller where memory ran
//! out in one of the stages.

use std::ops::Range;
use std::time::Instant;

use super::Pipeline;
use crate::auto::{Decision, Goal, Kind, Room, Sizer, Sizes, Story, Use, room};
use crate::batch::Batch;
use crate::bytes::Bytes;
use crate::memory::{Memory, Usage};
use crate::{Error, Result, Size, split};

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

/// A device's memory, and how it was before the step.
struct Watched {
    memory: Option<Memory>,
    before: Option<Usage>,
    room: Room,
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
            return Ok((run(self, &ranges)?, Story::default()));
        }
        let kind = Kind::of(used, batch);
        let (mut story, devices) = (Story::default(), self.devices.len());
        loop {
            let mut sizer = self.sizes.of(size).take(&kind, || vec![0; devices]);
            let ended = self.try_size(&mut sizer, samples, &mut story, &mut run);
            self.sizes.of(size).put(kind.clone(), sizer);
            if let Some(value) = ended? {
                return Ok((value, story));
            }
        }
    }

    /// One try with the size that is due; `None` where memory ran out.
    fn try_size<T>(
        &mut self,
        sizer: &mut Sizer,
        samples: usize,
        story: &mut Story,
        run: &mut impl FnMut(&mut Self, &[Range<usize>]) -> Result<T>,
    ) -> Result<Option<T>> {
        let watched = self.watch()?;
        let rooms: Vec<Room> = watched.iter().map(|watched| watched.room).collect();
        let trial = sizer.next_whole(&rooms, samples);
        let ranges = split::by_size(samples, trial.size)?;
        let mut decision = trial.decision(&ranges, sizer, &rooms);
        let start = Instant::now();
        match run(self, &ranges) {
            Ok(value) => {
                let seconds = start.elapsed().as_secs_f64();
                learn(sizer, &watched, &mut decision)?;
                sizer.observe_rate(trial.size, samples as f64 / seconds);
                sizer.succeeded(trial.size, &rooms, retried(&watched)?);
                sizer.announce(&decision);
                story.decisions.push(decision);
                Ok(Some(value))
            }
            Err(error) => {
                let oom = error.out_of_memory().cloned().ok_or(error)?;
                for memory in watched.iter().filter_map(|watched| watched.memory.as_ref()) {
                    memory.empty_cache()?;
                }
                decision.failed = true;
                sizer.announce(&decision);
                sizer.failed(trial.size, &rooms);
                story.failed(vec![decision], sizer, &rooms, oom).map(|()| None)
            }
        }
    }

    /// Every device's memory as it is now. One that is not counted has all that the machine has.
    fn watch(&self) -> Result<Vec<Watched>> {
        let watch = |memory: Option<Memory>| {
            let before = memory.as_ref().map(Memory::usage).transpose()?;
            let unlimited = Room { available: u64::MAX, budget: u64::MAX, held: 0 };
            let room = before.as_ref().map_or(Ok(unlimited), |usage| room(usage, 0))?;
            Ok::<_, Error>(Watched { memory, before, room })
        };
        self.devices.iter().map(|device| watch(device.memory())).collect()
    }
}

/// Takes note of what a size needed on each device.
fn learn(sizer: &mut Sizer, watched: &[Watched], decision: &mut Decision) -> Result<()> {
    let need = |watched: &Watched| match (&watched.memory, watched.before) {
        (Some(memory), Some(before)) => {
            Ok::<_, Error>(memory.usage()?.peak.0.saturating_sub(before.current.0))
        }
        _ => Ok(0),
    };
    let needs = watched.iter().map(need).collect::<Result<Vec<_>>>()?;
    sizer.observe_needs(decision.size, &needs, decision.micro_batches == 1);
    decision.measured = needs.into_iter().max().map(Bytes);
    Ok(())
}

/// Whether an allocator had to empty its cache.
fn retried(watched: &[Watched]) -> Result<bool> {
    for Watched { memory, before, .. } in watched {
        if let (Some(memory), Some(before)) = (memory, before)
            && memory.usage()?.allocation_retries > before.allocation_retries
        {
            return Ok(true);
        }
    }
    Ok(false)
}
