//! One size for a step that runs in several memories at once: where one runs out, all go smaller.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::room::room;
use super::sizer::{Room, Sizer};
use super::story::Story;
use crate::bytes::Bytes;
use crate::memory::{Memory, Usage};
use crate::{Error, Result, World, split};

/// The memories of a step, as they were before it. One that is not counted has all that the machine
/// has.
#[derive(Debug)]
pub(crate) struct Together {
    memories: Vec<Watched>,
    /// Of all ranks.
    rooms: Vec<Room>,
    world: World,
}

/// What a rank has learnt from a step.
#[derive(Debug, Serialize, Deserialize)]
struct Lesson {
    seconds: f64,
    needs: Vec<u64>,
    retried: bool,
}

#[derive(Debug)]
struct Watched {
    memory: Option<Memory>,
    before: Option<Usage>,
    room: Room,
}

impl Together {
    /// Reads what is free for a step on each rank, less what is `reserved` there for later. All ranks
    /// know all of it, and decide alike.
    pub(crate) fn in_world(
        memories: impl IntoIterator<Item = Option<Memory>>,
        reserved: u64,
        world: &World,
    ) -> Result<Self> {
        let watch = |memory: Option<Memory>| {
            let before = memory.as_ref().map(Memory::usage).transpose()?;
            let unlimited = Room { available: u64::MAX, budget: u64::MAX };
            let room = before.as_ref().map_or(Ok(unlimited), |usage| room(usage, reserved))?;
            Ok::<_, Error>(Watched { memory, before, room })
        };
        let memories = memories.into_iter().map(watch).collect::<Result<Vec<_>>>()?;
        let rooms: Vec<Room> = memories.iter().map(|watched| watched.room).collect();
        let rooms = world.settle("free memory", Ok(rooms), Duration::ZERO)?.concat();
        Ok(Self { memories, rooms, world: world.clone() })
    }

    /// How many memories there are.
    pub(crate) fn len(&self) -> usize {
        self.rooms.len()
    }

    /// One try with the size that is due for the longest part, of so many samples; `None` where
    /// memory ran out. What came of it is learnt.
    pub(crate) fn try_size<T>(
        &self,
        sizer: &mut Sizer,
        samples: usize,
        story: &mut Story,
        run: impl FnOnce(usize) -> Result<T>,
    ) -> Result<Option<T>> {
        let trial = sizer.next_whole(&self.rooms, samples);
        let mut decision =
            trial.decision(&split::by_size(samples, trial.size)?, sizer, &self.rooms);
        let start = Instant::now();
        match run(trial.size) {
            Ok(value) => {
                let Lesson { seconds, needs, retried } = self.lesson(start)?;
                sizer.observe_needs(trial.size, &needs, decision.micro_batches == 1);
                decision.measured = needs.into_iter().max().map(Bytes);
                sizer.observe_rate(trial.size, samples as f64 / seconds);
                sizer.succeeded(trial.size, &self.rooms, retried);
                sizer.announce(&decision);
                story.decisions.push(decision);
                Ok(Some(value))
            }
            Err(error) => {
                let oom = error.out_of_memory().cloned().ok_or(error)?;
                for memory in self.memories.iter().filter_map(|watched| watched.memory.as_ref()) {
                    memory.empty_cache()?;
                }
                decision.failed = true;
                sizer.announce(&decision);
                sizer.failed(trial.size, &self.rooms);
                story.failed(vec![decision], sizer, &self.rooms, oom).map(|()| None)
            }
        }
    }

    /// What a size needed in each memory of all ranks, and how long the first one's step took.
    fn lesson(&self, start: Instant) -> Result<Lesson> {
        let need = |watched: &Watched| match (&watched.memory, watched.before) {
            (Some(memory), Some(before)) => {
                Ok::<_, Error>(memory.usage()?.peak.0.saturating_sub(before.current.0))
            }
            _ => Ok(0),
        };
        let needs = self.memories.iter().map(need).collect::<Result<Vec<_>>>()?;
        let seconds = start.elapsed().as_secs_f64();
        let own = Lesson { seconds, needs, retried: self.retried()? };
        let all = self.world.settle("what was needed", Ok(own), Duration::ZERO)?;
        let (seconds, retried) = (all[0].seconds, all.iter().any(|lesson| lesson.retried));
        Ok(Lesson { seconds, retried, needs: all.into_iter().flat_map(|l| l.needs).collect() })
    }

    /// Whether an allocator had to empty its cache.
    fn retried(&self) -> Result<bool> {
        for Watched { memory, before, .. } in &self.memories {
            if let (Some(memory), Some(before)) = (memory, before)
                && memory.usage()?.allocation_retries > before.allocation_retries
            {
                return Ok(true);
            }
        }
        Ok(false)
    }
}
