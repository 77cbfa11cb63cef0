//! An automatic size at work: what each piece of a mini-batch needed and how long it took, and what
//! follows from that for the next.
//!
//! A step in one memory is cut piece by piece ([`SizeWatch::begin`]). One that runs in several
//! memories at once, on one device each, is tried whole ([`SizeWatch::whole`]): the tightest decides,
//! and where one runs out, all go smaller.

use std::ops::Range;
use std::time::Instant;

use tch::Device;

use super::decision::{Decision, Why};
use super::log::SizeLog;
use super::room::room;
use super::sizer::{MemoryRoom, Sizer, is_alone, tightest};
use super::stopwatch::Stopwatch;
use super::trial::{SizeTrial, in_near_equal_parts};
use crate::batch::Samples;
use crate::bytes::Bytes;
use crate::memory::{Memory, Usage};
use crate::oom::OutOfMemory;
use crate::{Error, Result, split};

/// The most that was in use in each memory, where who ran in it knows that better than its account:
/// replayed work needs memory that no account shows.
pub(crate) type Peaks = Vec<Option<Bytes>>;

/// The size, and what is seen of a try.
#[derive(Debug)]
pub(crate) struct SizeWatch {
    sizer: Sizer,
    decisions: Vec<Decision>,
    memories: Vec<Watched>,
    /// The most in use so far in the first memory.
    pub(crate) peak: Bytes,
    /// The least that a micro-batch of the mini-batch has.
    least: usize,
    piece: Option<Piece>,
    /// Whether the first pieces are to be taken back: see [`SizeWatch::new`].
    rehearses: bool,
}

/// A memory as it was before the try. One that is not counted has all that the machine has.
#[derive(Debug)]
struct Watched {
    counted: Option<(Memory, Usage)>,
    room: MemoryRoom,
}

impl Watched {
    fn now(memory: Option<Memory>, reserved: u64) -> Result<Self> {
        let Some(memory) = memory else {
            let room = MemoryRoom { available: u64::MAX, budget: u64::MAX };
            return Ok(Self { counted: None, room });
        };
        let before = memory.usage()?;
        Ok(Self { room: room(&before, reserved)?, counted: Some((memory, before)) })
    }

    /// That of a step that is cut piece by piece, which has one.
    fn memory(&self) -> &Memory {
        let counted = self.counted.as_ref();
        &counted.expect("a step in pieces is watched in a memory that counts").0
    }

    /// What it is now, and what it was.
    fn usage(&self) -> Result<Option<(Usage, Usage)>> {
        let Some((memory, before)) = &self.counted else { return Ok(None) };
        Ok(Some((memory.usage()?, *before)))
    }

    /// What was needed beyond what was there before.
    fn need(&self, told: Option<Bytes>) -> Result<u64> {
        Ok(self.usage()?.map_or(0, |(now, before)| {
            now.peak.max(told.unwrap_or_default()).0.saturating_sub(before.current.0)
        }))
    }
}

/// A piece that is being run.
#[derive(Debug)]
struct Piece {
    /// What was decided on, and the most that a micro-batch has of it.
    size: usize,
    largest: usize,
    /// What a micro-batch has on average.
    average: f64,
    stopwatch: Option<Stopwatch>,
    /// The most that a micro-batch had in use besides what the memory's account shows; and all that
    /// was in use then.
    unseen: u64,
    beside: u64,
    alone: bool,
}

impl SizeWatch {
    /// For a try in these memories, less the bytes of each that are reserved for later. One that
    /// `rehearses` ends with [`Error::Rehearsed`] once it is known how a better one would begin.
    pub(crate) fn new(
        sizer: Sizer,
        memories: impl Iterator<Item = (Option<Memory>, u64)>,
        rehearses: bool,
    ) -> Result<Self> {
        let memories = memories.map(|(memory, reserved)| Watched::now(memory, reserved));
        let memories = memories.collect::<Result<Vec<_>>>()?;
        let before = memories.first().and_then(|first| Some(first.counted.as_ref()?.1));
        Ok(Self {
            sizer,
            decisions: Vec::new(),
            memories,
            peak: before.map_or(Bytes(0), |before| before.current),
            least: 1,
            piece: None,
            rehearses,
        })
    }

    /// Decides on the next piece.
    pub(crate) fn begin(
        &mut self,
        next: usize,
        samples: &Samples,
        device: Device,
    ) -> Result<Vec<Range<usize>>> {
        let rooms = self.rooms();
        let units = samples.units();
        self.least = samples.least();
        if self.rehearses && next > 0 && self.sizer.begins_well(&rooms, units) {
            return Err(Error::Rehearsed);
        }
        let left = samples.part(&(next..samples.count()));
        let mut trial = self.sizer.next(&rooms, left.units(), units);
        let ranges = pieces(&left, &trial, samples)?;
        let ranges: Vec<_> = ranges.into_iter().map(|r| r.start + next..r.end + next).collect();
        let taken: Vec<usize> = ranges.iter().map(|range| samples.units_of(range)).collect();
        let largest = taken.iter().copied().max().unwrap_or(1);
        let average = taken.iter().sum::<usize>() as f64 / taken.len().max(1) as f64;
        trial.size = match samples.lengths() {
            // Near-equal micro-batches may be smaller than they were allowed to be.
            None => largest,
            // How full they are is chance, and differs from one mini-batch to the next.
            Some(_) => trial.size.max(largest),
        };
        self.decisions.push(trial.decision(&ranges, &self.sizer, &rooms));
        let stopwatch = trial.timed.then(|| Stopwatch::start(device)).transpose()?;
        let alone = is_alone(&ranges);
        let size = trial.size;
        self.piece = Some(Piece { size, largest, average, stopwatch, unseen: 0, beside: 0, alone });
        self.memories[0].memory().reset_peak()?;
        Ok(ranges)
    }

    /// Takes note of a micro-batch that was run: what it had in use besides what the memory's account
    /// shows, and whether others like it will take as long.
    pub(crate) fn lap(&mut self, unseen: Bytes, typical: bool) -> Result<()> {
        let Self { memories, piece: Some(piece), .. } = self else { return Ok(()) };
        // This runs at every micro-batch: the memory is asked only where there may be a new maximum.
        if unseen.0 > piece.unseen {
            piece.unseen = unseen.0;
            piece.beside = memories[0].memory().usage()?.current.0 + unseen.0;
        }
        piece.stopwatch.as_mut().map_or(Ok(()), |stopwatch| stopwatch.lap(typical))
    }

    /// Learns nothing from the piece that was begun.
    pub(crate) fn drop_piece(&mut self) {
        self.piece = None;
    }

    /// Learns from the piece that has been run.
    pub(crate) fn end(&mut self) -> Result<()> {
        let Some(piece) = self.piece.take() else { return Ok(()) };
        let Piece { size, largest, average, stopwatch, beside, alone, .. } = piece;
        let need = self.memories[0].need(Some(Bytes(beside)))?;
        self.peak = self.peak.max(self.memories[0].memory().usage()?.peak).max(Bytes(beside));
        self.learn_needs(largest, &[need], alone);
        if let Some(time) = stopwatch.map(|stopwatch| stopwatch.read()).transpose()?.flatten() {
            self.sizer.observe_rate(size, average / time.as_secs_f64());
        }
        Ok(())
    }

    /// One try of all samples at once, with the size that is due for the longest part and that `agree`
    /// leaves of it; no micro-batch, of whatever rank, has less than the `least`. `run` also gives the memories'
    /// peaks.
    pub(crate) fn whole<T>(
        &mut self,
        samples: &Samples,
        least: usize,
        agree: impl FnOnce(usize) -> Result<usize>,
        run: impl FnOnce(usize) -> Result<(T, Peaks)>,
    ) -> Result<T> {
        let rooms = self.rooms();
        let units = samples.units();
        // Everyone's: one sample that fails twice is the end, which all must come to at the same try.
        self.least = least;
        let mut trial = self.sizer.next_whole(&rooms, units.max(1));
        let own = trial.size.max(self.least);
        trial.size = agree(own)?;
        // Users are to see that other ranks decided, and that this one's memory did not.
        if trial.size < own {
            trial.why = Why::Others;
            self.sizer.policy.overruled(trial.size, tightest(&rooms));
        }
        let ranges = match samples.count() {
            0 => split::by_size(1, trial.size)?,
            _ => samples.by_units(trial.size)?,
        };
        let largest = ranges.iter().map(|range| samples.units_of(range)).max().unwrap_or(1);
        self.decisions.push(trial.decision(&ranges, &self.sizer, &rooms));
        let start = Instant::now();
        let (value, peaks) = run(trial.size)?;
        // Nothing is learnt from no sample.
        if units > 0 {
            let told = peaks.into_iter().chain(std::iter::repeat(None));
            let needs = self.memories.iter().zip(told).map(|(watched, peak)| watched.need(peak));
            let needs = needs.collect::<Result<Vec<_>>>()?;
            let size = if samples.lengths().is_some() { largest } else { trial.size };
            self.learn_needs(size, &needs, ranges.len() == 1);
            self.sizer.observe_rate(trial.size, units as f64 / start.elapsed().as_secs_f64());
        }
        Ok(value)
    }

    fn learn_needs(&mut self, size: usize, needs: &[u64], alone: bool) {
        self.sizer.observe_needs(size, needs, alone);
        if let Some(decision) = self.decisions.last_mut() {
            decision.measured = needs.iter().copied().max().map(Bytes);
            self.sizer.announce(decision);
        }
    }

    /// The try has succeeded: learns how it went; of one in which captures moved memory about, not
    /// whether the allocator had to, or refused them some. Gives the sizer back.
    pub(crate) fn succeeded(
        mut self,
        captured: bool,
        log: &mut SizeLog,
    ) -> Result<(Sizer, Ending)> {
        // The largest size of the try.
        let size = self.decisions.last().map_or(1, |decision| decision.size);
        let mut ending = Ending { retried: false, hidden: false, size };
        for watched in self.memories.iter().filter(|_| !captured) {
            let Some((now, before)) = watched.usage()? else { continue };
            ending.retried |= now.allocation_retries > before.allocation_retries;
            ending.hidden |= now.refusals > before.refusals;
        }
        let rooms = self.rooms();
        self.sizer.succeeded(ending.size, &rooms, ending.retried);
        log.decisions.append(&mut self.decisions);
        Ok((self.sizer, ending))
    }

    /// Memory ran out: the caches are emptied, and the next try will be smaller, unless a single sample
    /// has failed twice. Gives the sizer back.
    pub(crate) fn failed(
        mut self,
        oom: OutOfMemory,
        log: &mut SizeLog,
    ) -> Result<(Sizer, Result<()>)> {
        // What a cache holds is cut for the size that failed, and may fit none of the next one's tensors.
        let mut counted = self.memories.iter().filter_map(|watched| watched.counted.as_ref());
        counted.try_for_each(|(memory, _)| memory.empty_cache())?;
        let rooms = self.rooms();
        match self.decisions.last_mut() {
            Some(decision) => {
                decision.failed = true;
                self.sizer.announce(decision);
                let size = decision.size;
                // Another process may have taken memory meanwhile: the size is judged by what was there.
                let least = self.least_rooms()?;
                self.sizer.failed(size, &least);
            }
            // Without a decision no size is to blame.
            None => tracing::warn!(
                %oom,
                "memory ran out before the first micro-batch: the mini-batch is run again"
            ),
        }
        let decisions = std::mem::take(&mut self.decisions);
        let ended = log.failed(decisions, self.least, &self.sizer, &rooms, oom);
        if ended.is_err() {
            self.sizer.policy.given_up();
        }
        Ok((self.sizer, ended))
    }

    /// The try ended otherwise: what it has learnt stands. Gives the sizer back.
    pub(crate) fn ended(mut self, log: &mut SizeLog) -> Sizer {
        log.decisions.append(&mut self.decisions);
        self.sizer
    }

    /// The step ended with another error than of memory: what failed before in it is no longer in a row.
    pub(crate) fn given_up(mut self, log: &mut SizeLog) -> Sizer {
        self.sizer.policy.given_up();
        self.ended(log)
    }

    fn rooms(&self) -> Vec<MemoryRoom> {
        self.memories.iter().map(|watched| watched.room).collect()
    }

    /// What was free before the try or is free now, whichever is less.
    fn least_rooms(&self) -> Result<Vec<MemoryRoom>> {
        let least = |watched: &Watched| {
            let now = watched.usage()?.map_or(Ok(watched.room), |(now, _)| room(&now, 0))?;
            Ok(if now.available < watched.room.available { now } else { watched.room })
        };
        self.memories.iter().map(least).collect()
    }
}

/// How a try ended that has succeeded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ending {
    /// Whether an allocator had to empty its cache.
    pub(crate) retried: bool,
    /// Whether memory ran out and somebody went on without it.
    pub(crate) hidden: bool,
    pub(crate) size: usize,
}

/// The micro-batches of a piece: of what is left of all samples.
fn pieces(left: &Samples, trial: &SizeTrial, all: &Samples) -> Result<Vec<Range<usize>>> {
    if left.lengths().is_some() {
        let mut ranges = left.by_units(trial.size)?;
        ranges.truncate(trial.micro_batches.unwrap_or(usize::MAX));
        return Ok(ranges);
    }
    match trial.micro_batches {
        Some(count) => first_of(left.count(), trial.size, count),
        None if left.count() == all.count() => Ok(all.by_units(trial.size)?),
        // Of exactly the size that later steps will have: a new one costs a device its
        // preparations.
        None => of_exactly(left.count(), in_near_equal_parts(all.count(), trial.size)),
    }
}

/// `count` micro-batches of `size` samples, or as many as there are; a single sample is not left
/// alone, which batch normalisation could not digest.
fn first_of(samples: usize, size: usize, count: usize) -> Result<Vec<Range<usize>>> {
    let count = count.min(samples / size).max(1);
    match samples.saturating_sub(count * size) {
        0 | 1 => Ok(split::by_count(samples, count)?),
        _ => Ok((0..count).map(|i| i * size..(i + 1) * size).collect()),
    }
}

/// Micro-batches of `size` samples, and one of what is left; near-equal ones where that would be a
/// single sample.
fn of_exactly(samples: usize, size: usize) -> Result<Vec<Range<usize>>> {
    match samples % size {
        1 => Ok(split::by_size(samples, size)?),
        _ => {
            Ok((0..samples.div_ceil(size)).map(|i| i * size..samples.min((i + 1) * size)).collect())
        }
    }
}
