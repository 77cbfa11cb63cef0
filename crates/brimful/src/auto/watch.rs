//! Runs an automatic size: measures the need and the time of each piece of a mini-batch, and decides on the
//! next.
//!
//! A step in one memory is cut piece by piece ([`SizeWatch::begin`]). A step that runs in several memories
//! at once, on one device each, has one size ([`SizeWatch::begin_whole`]): the tightest memory decides, and if one
//! runs out, all take a smaller size.

use std::ops::Range;
use std::time::Instant;

use tch::Device;

use super::decision::{Decision, SizeTrial, Why, in_near_equal_parts};
use super::rates::Stopwatch;
use super::sizer::{FreeMemory, SizeLog, Sizer, free_memory, is_alone, tightest};
use crate::batch::Samples;
use crate::memory::{Memory, Usage};
use crate::oom::OutOfMemory;
use crate::{Error, Result};
use brimful_plan::bytes::Bytes;
use brimful_plan::split;

/// Peak bytes in use in each memory, if the engine knows them better than the memory's account: CUDA graphs need
/// memory that no account shows.
pub(crate) type Peaks = Vec<Option<Bytes>>;

/// Sizer and measurements of one attempt.
#[derive(Debug)]
pub(crate) struct SizeWatch {
    sizer: Sizer,
    decisions: Vec<Decision>,
    memories: Vec<Watched>,
    /// Peak bytes in use so far in the first memory.
    pub(crate) peak: Bytes,
    /// Lower bound on the units of a micro-batch.
    least: usize,
    piece: Option<Piece>,
    whole: Option<Whole>,
    /// Whether the first pieces are to be rolled back: see [`SizeWatch::new`].
    rehearses: bool,
}

/// Memory as it was before the attempt. A memory without an account counts as unlimited.
#[derive(Debug)]
struct Watched {
    counted: Option<(Memory, Usage)>,
    free_memory: FreeMemory,
}

impl Watched {
    fn now(memory: Option<Memory>, reserved: u64) -> Result<Self> {
        let Some(memory) = memory else {
            let free_memory = FreeMemory { available: u64::MAX, budget: u64::MAX };
            return Ok(Self { counted: None, free_memory });
        };
        let before = memory.usage()?;
        Ok(Self { free_memory: free_memory(&before, reserved)?, counted: Some((memory, before)) })
    }

    /// Returns the memory of a step that is cut piece by piece. Such a step has an account of its memory.
    fn memory(&self) -> &Memory {
        let counted = self.counted.as_ref();
        &counted.expect("a step in pieces is watched in a memory that counts").0
    }

    /// Returns the usage now and before the attempt.
    fn usage(&self) -> Result<Option<(Usage, Usage)>> {
        let Some((memory, before)) = &self.counted else { return Ok(None) };
        Ok(Some((memory.usage()?, *before)))
    }

    /// Returns the bytes needed beyond those in use before the attempt.
    fn need(&self, reported: Option<Bytes>) -> Result<u64> {
        Ok(self.usage()?.map_or(0, |(now, before)| {
            now.peak.max(reported.unwrap_or_default()).0.saturating_sub(before.current.0)
        }))
    }
}

/// Piece that is being run.
#[derive(Debug)]
struct Piece {
    /// Size that was decided on, and the largest micro-batch of the piece.
    size: usize,
    largest: usize,
    /// Average units of a micro-batch.
    average: f64,
    stopwatch: Option<Stopwatch>,
    /// Largest number of bytes of a micro-batch that the memory's account does not show, and all bytes in use at
    /// that time.
    unseen: u64,
    beside: u64,
    alone: bool,
}

/// Attempt with one size for all samples.
#[derive(Debug)]
struct Whole {
    /// Longest part of this rank.
    part: Samples,
    trial: SizeTrial,
    /// Size that this rank would take.
    own: usize,
    /// Units of the largest micro-batch.
    largest: usize,
    /// True if there is one micro-batch.
    alone: bool,
    start: Instant,
}

impl SizeWatch {
    /// Begins an attempt in these memories; the number beside each memory is the bytes in it that are reserved for
    /// later. A rehearsal (`rehearses`) ends with [`Error::Rehearsed`] as soon as a better first size is known.
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
            whole: None,
            rehearses,
        })
    }

    /// Decides on the next piece and returns its micro-batches.
    pub(crate) fn begin(
        &mut self,
        next: usize,
        samples: &Samples,
        device: Device,
    ) -> Result<Vec<Range<usize>>> {
        let free_memories = self.free_memories();
        let units = samples.units();
        self.least = samples.least();
        if self.rehearses && next > 0 && self.sizer.begins_well(&free_memories, units) {
            return Err(Error::Rehearsed);
        }
        let left = samples.part(&(next..samples.count()));
        let mut trial = self.sizer.next(&free_memories, left.units(), units);
        let ranges = pieces(&left, &trial, samples)?;
        let ranges: Vec<_> = ranges.into_iter().map(|r| r.start + next..r.end + next).collect();
        let taken: Vec<usize> = ranges.iter().map(|range| samples.units_of(range)).collect();
        let largest = taken.iter().copied().max().unwrap_or(1);
        let average = taken.iter().sum::<usize>() as f64 / taken.len().max(1) as f64;
        trial.size = match samples.lengths() {
            // Near-equal micro-batches may be smaller than the trial allows.
            None => largest,
            // Micro-batches of sequences are not equally full in every mini-batch, so the trial's size stays the
            // limit.
            Some(_) => trial.size.max(largest),
        };
        self.decisions.push(self.sizer.decision(&trial, &ranges, &free_memories));
        let stopwatch = trial.timed.then(|| Stopwatch::start(device)).transpose()?;
        let alone = is_alone(&ranges);
        let size = trial.size;
        self.piece = Some(Piece { size, largest, average, stopwatch, unseen: 0, beside: 0, alone });
        self.memories[0].memory().reset_peak()?;
        Ok(ranges)
    }

    /// Records a micro-batch that was run: the bytes that the memory's account does not show, and whether other
    /// micro-batches will take as long.
    pub(crate) fn lap(&mut self, unseen: Bytes, typical: bool) -> Result<()> {
        let Self { memories, piece: Some(piece), .. } = self else { return Ok(()) };
        // This runs at every micro-batch, so the memory is read only if there may be a new maximum.
        if unseen.0 > piece.unseen {
            piece.unseen = unseen.0;
            piece.beside = memories[0].memory().usage()?.current.0 + unseen.0;
        }
        piece.stopwatch.as_mut().map_or(Ok(()), |stopwatch| stopwatch.lap(typical))
    }

    /// Drops the measurements of the current piece.
    pub(crate) fn drop_piece(&mut self) {
        self.piece = None;
    }

    /// Learns the need and the rate of the piece that has been run.
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

    /// Begins an attempt with one size for all samples of a part, the longest of this rank's. Returns this rank's
    /// size; all ranks then take the smallest size of any rank. No micro-batch of any rank is smaller than
    /// `least`.
    pub(crate) fn begin_whole(&mut self, part: Samples, least: usize) -> usize {
        // A lower bound that all ranks share, because all must give up in the same attempt: when the smallest size
        // has failed twice.
        self.least = least;
        let trial = self.sizer.next_whole(&self.free_memories(), part.units().max(1));
        let own = trial.size.max(least);
        let start = Instant::now();
        self.whole = Some(Whole { part, trial, own, largest: 1, alone: true, start });
        own
    }

    /// Takes the size on which all ranks agree, and starts to measure.
    pub(crate) fn agreed(&mut self, size: usize) -> Result<()> {
        let free_memories = self.free_memories();
        let Self { whole: Some(whole), sizer, .. } = self else { return Ok(()) };
        whole.trial.size = size;
        // Recorded, so that users see that other ranks limited the size, not this rank's memory.
        if size < whole.own {
            whole.trial.why = Why::Others;
            sizer.policy.overruled(size, tightest(&free_memories));
        }
        let ranges = match whole.part.count() {
            0 => split::by_size(1, size)?,
            _ => whole.part.by_units(size)?,
        };
        let units = ranges.iter().map(|range| whole.part.units_of(range));
        whole.largest = units.max().unwrap_or(1);
        whole.alone = ranges.len() == 1;
        self.decisions.push(sizer.decision(&whole.trial, &ranges, &free_memories));
        whole.start = Instant::now();
        Ok(())
    }

    /// Learns the needs and the rate of an attempt with one size; `peaks` are those that the engine knows.
    pub(crate) fn end_whole(&mut self, peaks: Peaks) -> Result<()> {
        let Some(Whole { part, trial, largest, alone, start, .. }) = self.whole.take() else {
            return Ok(());
        };
        let seconds = start.elapsed().as_secs_f64();
        // An empty part has nothing to measure.
        if part.units() == 0 {
            return Ok(());
        }
        let reported = peaks.into_iter().chain(std::iter::repeat(None));
        let needs = self.memories.iter().zip(reported).map(|(watched, peak)| watched.need(peak));
        let needs = needs.collect::<Result<Vec<_>>>()?;
        let size = if part.lengths().is_some() { largest } else { trial.size };
        self.learn_needs(size, &needs, alone);
        self.sizer.observe_rate(trial.size, part.units() as f64 / seconds);
        Ok(())
    }

    fn learn_needs(&mut self, size: usize, needs: &[u64], alone: bool) {
        self.sizer.observe_needs(size, needs, alone);
        if let Some(decision) = self.decisions.last_mut() {
            decision.measured = needs.iter().copied().max().map(Bytes);
            self.sizer.announce(decision);
        }
    }

    /// Records that the attempt succeeded and returns the sizer. An attempt that captured CUDA graphs moves
    /// memory itself, so its allocator retries and refusals do not count.
    pub(crate) fn succeeded(
        mut self,
        captured: bool,
        log: &mut SizeLog,
    ) -> Result<(Sizer, Ending)> {
        // Size of the attempt's last decision.
        let size = self.decisions.last().map_or(1, |decision| decision.size);
        let mut ending = Ending { retried: false, hidden: false, size };
        for watched in self.memories.iter().filter(|_| !captured) {
            let Some((now, before)) = watched.usage()? else { continue };
            ending.retried |= now.allocation_retries > before.allocation_retries;
            ending.hidden |= now.refusals > before.refusals;
        }
        let free_memories = self.free_memories();
        self.sizer.succeeded(ending.size, &free_memories, ending.retried);
        log.decisions.append(&mut self.decisions);
        Ok((self.sizer, ending))
    }

    /// Records that memory ran out: empties the caches, and lowers the size for the next attempt unless a
    /// single sample has failed twice. Returns the sizer.
    pub(crate) fn failed(
        mut self,
        oom: OutOfMemory,
        log: &mut SizeLog,
    ) -> Result<(Sizer, Result<()>)> {
        // The blocks in a cache have the sizes of the failed attempt's tensors, and may fit none of the next
        // attempt's.
        let mut counted = self.memories.iter().filter_map(|watched| watched.counted.as_ref());
        counted.try_for_each(|(memory, _)| memory.empty_cache())?;
        let free_memories = self.free_memories();
        match self.decisions.last_mut() {
            Some(decision) => {
                decision.failed = true;
                self.sizer.announce(decision);
                let size = decision.size;
                // Another process may have taken memory during the attempt, so the size is judged by the least
                // free bytes.
                let least = self.least_free_memories()?;
                self.sizer.failed(size, &least);
            }
            // Without a decision no size is to blame.
            None => tracing::warn!(
                %oom,
                "memory ran out before the first micro-batch: the mini-batch is run again"
            ),
        }
        let decisions = std::mem::take(&mut self.decisions);
        let ended = log.failed(decisions, self.least, &self.sizer, &free_memories, oom);
        if ended.is_err() {
            self.sizer.policy.given_up();
        }
        Ok((self.sizer, ended))
    }

    /// Ends an attempt that neither succeeded nor ran out of memory. Keeps its measurements and returns the sizer.
    pub(crate) fn ended(mut self, log: &mut SizeLog) -> Sizer {
        log.decisions.append(&mut self.decisions);
        self.sizer
    }

    /// Ends the step with another error than out of memory, which resets the count of consecutive failures.
    pub(crate) fn given_up(mut self, log: &mut SizeLog) -> Sizer {
        self.sizer.policy.given_up();
        self.ended(log)
    }

    fn free_memories(&self) -> Vec<FreeMemory> {
        self.memories.iter().map(|watched| watched.free_memory).collect()
    }

    /// Returns the bytes free before the attempt or now, whichever is less.
    fn least_free_memories(&self) -> Result<Vec<FreeMemory>> {
        let least = |watched: &Watched| {
            let now = watched
                .usage()?
                .map_or(Ok(watched.free_memory), |(now, _)| free_memory(&now, 0))?;
            Ok(if now.available < watched.free_memory.available {
                now
            } else {
                watched.free_memory
            })
        };
        self.memories.iter().map(least).collect()
    }
}

/// Result of an attempt that has succeeded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ending {
    /// Whether an allocator had to empty its cache.
    pub(crate) retried: bool,
    /// Whether an allocation was refused and the caller went on without it.
    pub(crate) hidden: bool,
    pub(crate) size: usize,
}

/// Cuts the next piece off the samples that are left.
fn pieces(left: &Samples, trial: &SizeTrial, all: &Samples) -> Result<Vec<Range<usize>>> {
    if left.lengths().is_some() {
        let mut ranges = left.by_units(trial.size)?;
        ranges.truncate(trial.micro_batches.unwrap_or(usize::MAX));
        return Ok(ranges);
    }
    match trial.micro_batches {
        Some(count) => first_of(left.count(), trial.size, count),
        None if left.count() == all.count() => Ok(all.by_units(trial.size)?),
        // Exactly the size that later steps will have, because a device has to prepare for each new size.
        None => of_exactly(left.count(), in_near_equal_parts(all.count(), trial.size)),
    }
}

/// Returns `count` micro-batches of `size` samples, or as many as there are. Leaves no rest of a single sample,
/// because batch normalisation cannot train with one.
fn first_of(samples: usize, size: usize, count: usize) -> Result<Vec<Range<usize>>> {
    let count = count.min(samples / size).max(1);
    match samples.saturating_sub(count * size) {
        0 | 1 => Ok(split::by_count(samples, count)?),
        _ => Ok((0..count).map(|i| i * size..(i + 1) * size).collect()),
    }
}

/// Returns micro-batches of `size` samples and one of the rest; near-equal ones if the rest would be a single
/// sample.
fn of_exactly(samples: usize, size: usize) -> Result<Vec<Range<usize>>> {
    match samples % size {
        1 => Ok(split::by_size(samples, size)?),
        _ => {
            Ok((0..samples.div_ceil(size)).map(|i| i * size..samples.min((i + 1) * size)).collect())
        }
    }
}
