//! An automatic size at work: what each piece of a mini-batch needed and how long it took, and what
//! follows from that for the next.

use std::ops::Range;

use tch::Device;

use super::cut::Ran;
use crate::auto::{Decision, Room, Sizer, Stopwatch, in_near_equal_parts, is_alone, room};
use crate::bytes::Bytes;
use crate::memory::{Memory, Usage};
use crate::{Error, Result, split};

/// The size, and what is seen of the step.
#[derive(Debug)]
pub(super) struct Watch {
    pub(super) sizer: Sizer,
    pub(super) decisions: Vec<Decision>,
    memory: Memory,
    room: Room,
    /// As the memory was before the step.
    before: Usage,
    /// The most in use so far.
    pub(super) peak: Bytes,
    piece: Option<Piece>,
    /// Whether the first pieces are to be taken back: see [`Watch::rehearsing`].
    rehearses: bool,
}

/// A piece that is being run.
#[derive(Debug)]
struct Piece {
    size: usize,
    /// Samples between two marks of the stopwatch.
    lap: usize,
    stopwatch: Option<Stopwatch>,
    /// The most that a micro-batch had in use besides what the memory's account shows; and all that
    /// was in use then.
    unseen: u64,
    beside: u64,
    alone: bool,
}

impl Watch {
    pub(super) fn new(sizer: Sizer, memory: &Memory, reserved: u64) -> Result<Self> {
        let before = memory.usage()?;
        Ok(Self {
            sizer,
            decisions: Vec::new(),
            memory: memory.clone(),
            room: room(&before, reserved)?,
            before,
            peak: before.current,
            piece: None,
            rehearses: false,
        })
    }

    /// Lets the step end with [`Error::Rehearsed`] once it is known how a better one would begin.
    pub(super) fn rehearsing(self, rehearses: bool) -> Self {
        Self { rehearses, ..self }
    }

    /// Decides on the next piece.
    pub(super) fn begin(
        &mut self,
        next: usize,
        samples: usize,
        device: Device,
    ) -> Result<Vec<Range<usize>>> {
        if self.rehearses && next > 0 && self.sizer.begins_well(&[self.room], samples) {
            return Err(Error::Rehearsed);
        }
        let mut trial = self.sizer.next(&[self.room], samples - next, samples);
        let ranges = match trial.micro_batches {
            Some(count) => first_of(samples - next, trial.size, count)?,
            None if next == 0 => split::by_size(samples, trial.size)?,
            // Of exactly the size that later steps will have: a new one costs a device its
            // preparations.
            None => of_exactly(samples - next, in_near_equal_parts(samples, trial.size))?,
        };
        let ranges: Vec<_> = ranges.into_iter().map(|r| r.start + next..r.end + next).collect();
        // Near-equal micro-batches may be smaller than they were allowed to be.
        trial.size = longest(&ranges);
        self.decisions.push(trial.decision(&ranges, &self.sizer, &[self.room]));
        let stopwatch = trial.timed.then(|| Stopwatch::start(device)).transpose()?;
        self.open(longest(&ranges), &ranges, stopwatch)?;
        Ok(ranges)
    }

    /// Decides on all of the mini-batch at once.
    pub(super) fn begin_all(
        &mut self,
        samples: usize,
        device: Device,
    ) -> Result<Vec<Range<usize>>> {
        let trial = self.sizer.next_whole(&[self.room], samples);
        let ranges = split::by_size(samples, trial.size)?;
        self.decisions.push(trial.decision(&ranges, &self.sizer, &[self.room]));
        self.open(samples, &ranges, Some(Stopwatch::start(device)?))?;
        Ok(ranges)
    }

    fn open(
        &mut self,
        lap: usize,
        ranges: &[Range<usize>],
        stopwatch: Option<Stopwatch>,
    ) -> Result<()> {
        let (size, alone) = (longest(ranges), is_alone(ranges));
        self.piece = Some(Piece { size, lap, stopwatch, unseen: 0, beside: 0, alone });
        self.memory.reset_peak()
    }

    pub(super) fn lap(&mut self, ran: Ran) -> Result<()> {
        let Some(piece) = &mut self.piece else { return Ok(()) };
        if ran.unseen.0 > piece.unseen {
            piece.unseen = ran.unseen.0;
            piece.beside = self.memory.usage()?.current.0 + piece.unseen;
        }
        piece.stopwatch.as_mut().map_or(Ok(()), |stopwatch| stopwatch.lap(ran.typical))
    }

    /// Learns nothing from the piece that was begun.
    pub(super) fn drop_piece(&mut self) {
        self.piece = None;
    }

    /// Learns from the piece that has been run.
    pub(super) fn end(&mut self) -> Result<()> {
        let Some(piece) = self.piece.take() else { return Ok(()) };
        let Piece { size, lap, stopwatch, beside, alone, .. } = piece;
        let peak = self.memory.usage()?.peak.max(Bytes(beside));
        self.peak = self.peak.max(peak);
        let need = peak.0.saturating_sub(self.before.current.0);
        self.sizer.observe_needs(size, &[need], alone);
        if let Some(decision) = self.decisions.last_mut() {
            decision.measured = Some(Bytes(need));
            self.sizer.announce(decision);
        }
        if let Some(time) = stopwatch.map(|stopwatch| stopwatch.read()).transpose()?.flatten() {
            self.sizer.observe_rate(size, lap as f64 / time.as_secs_f64());
        }
        Ok(())
    }

    /// The largest size of the step.
    pub(super) fn size(&self) -> usize {
        self.decisions.last().map_or(1, |decision| decision.size)
    }

    /// The step is done: learns how it went; of one in which captures moved memory about, not whether
    /// the allocator had to, or refused them some.
    pub(super) fn succeeded(&mut self, captured: bool) -> Result<Ending> {
        let now = self.memory.usage()?;
        let retried = !captured && now.allocation_retries > self.before.allocation_retries;
        let hidden = !captured && now.refusals > self.before.refusals;
        self.sizer.succeeded(self.size(), &[self.room], retried);
        Ok(Ending { retried, hidden })
    }

    /// Memory ran out: the next try will be smaller.
    pub(super) fn failed(&mut self) -> Result<()> {
        // Without a decision no size is to blame.
        let Some(decision) = self.decisions.last_mut() else { return Ok(()) };
        decision.failed = true;
        self.sizer.announce(decision);
        let size = decision.size;
        let now = room(&self.memory.usage()?, 0)?;
        let least = if now.available < self.room.available { now } else { self.room };
        self.sizer.failed(size, &[least]);
        Ok(())
    }

    pub(super) fn room(&self) -> Room {
        self.room
    }
}

/// How a step ended that has succeeded.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ending {
    /// Whether the allocator had to empty its cache.
    pub(super) retried: bool,
    /// Whether memory ran out and somebody went on without it.
    pub(super) hidden: bool,
}

fn longest(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(ExactSizeIterator::len).max().unwrap_or(1)
}

/// `count` micro-batches of `size` samples, or as many as there are; a single sample is not left
/// alone, which batch normalisation could not digest.
fn first_of(samples: usize, size: usize, count: usize) -> Result<Vec<Range<usize>>> {
    let count = count.min(samples / size).max(1);
    match samples.saturating_sub(count * size) {
        0 | 1 => split::by_count(samples, count),
        _ => Ok((0..count).map(|i| i * size..(i + 1) * size).collect()),
    }
}

/// Micro-batches of `size` samples, and one of what is left; near-equal ones where that would be a
/// single sample.
fn of_exactly(samples: usize, size: usize) -> Result<Vec<Range<usize>>> {
    match samples % size {
        1 => split::by_size(samples, size),
        _ => {
            Ok((0..samples.div_ceil(size)).map(|i| i * size..samples.min((i + 1) * size)).collect())
        }
    }
}
