//! One size for a step that runs in several memories at once: where one runs out, all go smaller.

use std::time::Instant;

use super::decision::{Decision, Why};
use super::room::room;
use super::sizer::{Room, Sizer};
use super::story::Story;
use crate::bytes::Bytes;
use crate::memory::{Memory, Usage};
use crate::{Error, Result, split};

/// The memories of a step, as they were before it. One that is not counted has all that the machine
/// has.
#[derive(Debug)]
pub(crate) struct Together(Vec<Watched>);

#[derive(Debug)]
struct Watched {
    memory: Option<Memory>,
    before: Option<Usage>,
    room: Room,
}

/// The peak of each memory, where the one who ran in it knows it better than its account.
pub(crate) type Peaks = Vec<Option<Bytes>>;

impl Together {
    /// Reads what is free of each memory, less the bytes that are reserved for later.
    pub(crate) fn now(memories: impl IntoIterator<Item = (Option<Memory>, u64)>) -> Result<Self> {
        let watch = |(memory, reserved): (Option<Memory>, u64)| {
            let before = memory.as_ref().map(Memory::usage).transpose()?;
            let unlimited = Room { available: u64::MAX, budget: u64::MAX };
            let room = before.as_ref().map_or(Ok(unlimited), |usage| room(usage, reserved))?;
            Ok::<_, Error>(Watched { memory, before, room })
        };
        Ok(Self(memories.into_iter().map(watch).collect::<Result<_>>()?))
    }

    /// One try with the size that is due for the longest part, of so many samples, and that `agree`
    /// leaves of it; `None` where memory ran out. What came of it is learnt: `run` also gives the peak
    /// of each memory that has one beyond what its account shows, as replayed work does.
    pub(crate) fn try_size<T>(
        &self,
        sizer: &mut Sizer,
        samples: usize,
        story: &mut Story,
        agree: impl FnOnce(usize) -> Result<usize>,
        run: impl FnOnce(usize) -> Result<(T, Peaks)>,
    ) -> Result<Option<T>> {
        let rooms: Vec<Room> = self.0.iter().map(|watched| watched.room).collect();
        let mut trial = sizer.next_whole(&rooms, samples.max(1));
        let own = trial.size;
        trial.size = agree(own)?;
        if trial.size < own {
            trial.why = Why::Others;
        }
        let ranges = split::by_size(samples.max(1), trial.size)?;
        let mut decision = trial.decision(&ranges, sizer, &rooms);
        let start = Instant::now();
        match run(trial.size) {
            Ok((value, peaks)) => {
                let seconds = start.elapsed().as_secs_f64();
                // Nothing is learnt from no sample.
                if samples > 0 {
                    self.learn(sizer, &mut decision, &peaks)?;
                    sizer.observe_rate(trial.size, samples as f64 / seconds);
                }
                sizer.succeeded(trial.size, &rooms, self.retried()?);
                sizer.announce(&decision);
                story.decisions.push(decision);
                Ok(Some(value))
            }
            Err(error) => {
                let oom = error.out_of_memory().cloned().ok_or(error)?;
                for memory in self.0.iter().filter_map(|watched| watched.memory.as_ref()) {
                    memory.empty_cache()?;
                }
                decision.failed = true;
                sizer.announce(&decision);
                sizer.failed(trial.size, &rooms);
                story.failed(vec![decision], sizer, &rooms, oom).map(|()| None)
            }
        }
    }

    /// Takes note of what a size needed in each memory.
    fn learn(&self, sizer: &mut Sizer, decision: &mut Decision, peaks: &Peaks) -> Result<()> {
        let need = |(at, watched): (usize, &Watched)| match (&watched.memory, watched.before) {
            (Some(memory), Some(before)) => {
                let told = peaks.get(at).copied().flatten().unwrap_or_default();
                let peak = memory.usage()?.peak.max(told);
                Ok::<_, Error>(peak.0.saturating_sub(before.current.0))
            }
            _ => Ok(0),
        };
        let needs = self.0.iter().enumerate().map(need).collect::<Result<Vec<_>>>()?;
        sizer.observe_needs(decision.size, &needs, decision.micro_batches == 1);
        decision.measured = needs.into_iter().max().map(Bytes);
        Ok(())
    }

    /// Whether an allocator had to empty its cache.
    fn retried(&self) -> Result<bool> {
        for Watched { memory, before, .. } in &self.0 {
            if let (Some(memory), Some(before)) = (memory, before)
                && memory.usage()?.allocation_retries > before.allocation_retries
            {
                return Ok(true);
            }
        }
        Ok(false)
    }
}
