//! Sizes of micro-batches, a mini-batch's role in its step, and its cut: hands out micro-batches piece by piece.
//!
//! A given size makes one piece. An automatic size in a single memory makes several while it learns: the memory
//! and time that a piece takes decide on the next ([`SizeWatch`]).

use std::ops::Range;

use tch::Device;

use super::StepError;
use crate::Result;
use crate::auto::SizeWatch;
use crate::batch::{Batch, BatchError, Borrower, Samples};
use crate::feed::Feed;
use crate::loss::MicroBatchWeight;
use crate::random::{Generator, StepRng};
use crate::streams::CopyStreams;
use brimful_plan::bytes::Bytes;
use brimful_plan::split;

/// A mini-batch that is being handed out micro-batch by micro-batch.
#[derive(Debug)]
pub(crate) struct Cut {
    samples: Samples,
    /// The first sample that has not been handed out.
    next: usize,
    /// Read only where the size is given.
    size: MicroBatches,
    /// All micro-batches, where the size is given.
    given: Vec<Range<usize>>,
    /// Decides on the next piece, where the size is automatic.
    watch: Option<SizeWatch>,
    sizes: Vec<usize>,
}

/// Position of a micro-batch within its mini-batch.
#[derive(Debug)]
pub(crate) struct MicroBatchInfo {
    pub(crate) number: usize,
    /// Samples that it holds.
    pub(crate) range: Range<usize>,
    /// Its weight in the step.
    pub(crate) weight: MicroBatchWeight,
    /// True if this size is only being tried on a part of the mini-batch.
    pub(crate) is_trial: bool,
}

/// Measurements of a micro-batch that has run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MicroBatchRun {
    /// Bytes in use that the memory's account does not show.
    pub(crate) unseen: Bytes,
    /// True if its time is typical of its size.
    pub(crate) typical: bool,
}

impl MicroBatchRun {
    pub(crate) const PLAINLY: Self = Self { unseen: Bytes(0), typical: true };
}

impl Cut {
    /// Cuts these samples by a given size; without samples there are no micro-batches.
    pub(crate) fn given(samples: Samples, size: MicroBatches) -> Result<Self> {
        let given = match samples.count() {
            0 => Vec::new(),
            _ => size.cut(&samples)?.ok_or(BatchError::NothingToCut)?,
        };
        Ok(Self { samples, next: 0, size, given, watch: None, sizes: Vec::new() })
    }

    /// Cuts these samples by an automatic size.
    pub(crate) fn watched(samples: Samples, size: MicroBatches, watch: SizeWatch) -> Self {
        let (given, watch) = (Vec::new(), Some(watch));
        Self { samples, next: 0, size, given, watch, sizes: Vec::new() }
    }

    /// Restarts at the first sample.
    pub(crate) fn restart(&mut self) {
        self.next = 0;
        self.sizes.clear();
        if let Some(watch) = &mut self.watch {
            watch.drop_piece();
        }
    }

    /// Returns the size by which each part is cut, where the whole mini-batch has one size.
    pub(crate) fn size(&self) -> Option<MicroBatches> {
        self.watch.is_none().then_some(self.size)
    }

    /// Returns the number of micro-batches, where it is known beforehand.
    pub(crate) fn given_count(&self) -> Option<usize> {
        self.watch.is_none().then_some(self.given.len())
    }

    /// Returns the samples that are cut, in the order in which they run.
    pub(crate) fn samples(&self) -> &Samples {
        &self.samples
    }

    /// Returns the lengths of the micro-batches handed out so far.
    pub(crate) fn sizes(&self) -> &[usize] {
        &self.sizes
    }

    /// Returns the peak memory of the pieces that have finished.
    pub(crate) fn peak(&self) -> Bytes {
        self.watch.as_ref().map_or(Bytes(0), |watch| watch.peak)
    }

    pub(crate) fn into_watch(self) -> Option<SizeWatch> {
        self.watch
    }

    /// Hands out the micro-batches to a borrower, on the device of the copies. Where the role has a seed, each
    /// micro-batch draws from a generator of its own.
    pub(crate) fn micro_batches<'a, B: Batch>(
        &'a mut self,
        batch: &'a B,
        role: BatchRole,
        streams: &'a CopyStreams,
        borrower: Borrower,
    ) -> CutBatch<'a, B> {
        let generator = role.seed.map(|seed| seed.on(streams.device));
        CutBatch { cut: self, batch, role, streams, borrower, generator, piece: None }
    }

    /// Returns all micro-batches at once, for steps that run them more than once. The size must be given.
    pub(crate) fn all(&mut self) -> Result<Vec<Range<usize>>> {
        self.next_piece(Device::Cpu)
    }

    fn next_piece(&mut self, device: Device) -> Result<Vec<Range<usize>>> {
        let ranges = match &mut self.watch {
            None => self.given.clone(),
            Some(watch) => watch.begin(self.next, &self.samples, device)?,
        };
        self.next = ranges.last().map_or(self.samples.count(), |last| last.end);
        self.sizes.extend(ranges.iter().map(ExactSizeIterator::len));
        Ok(ranges)
    }
}

/// Micro-batches of a mini-batch that is being cut: [`CutBatch::next`] and [`CutBatch::done`] by turns.
pub(crate) struct CutBatch<'a, B: Batch> {
    cut: &'a mut Cut,
    batch: &'a B,
    role: BatchRole,
    streams: &'a CopyStreams,
    borrower: Borrower,
    generator: Option<PartGenerator>,
    piece: Option<Piece<'a, B>>,
}

/// Consecutive micro-batches of one size.
struct Piece<'a, B: Batch> {
    feed: Feed<'a, B>,
    /// Number of the next micro-batch in the mini-batch.
    number: usize,
    /// True if the piece is less than the mini-batch: it tries out its size, for which a capture, for example, is
    /// not worthwhile.
    is_trial: bool,
}

impl<B: Batch> CutBatch<'_, B> {
    /// Returns the next micro-batch; `None` after the last one.
    pub(crate) fn next(&mut self) -> Result<Option<(MicroBatchInfo, B)>> {
        loop {
            if let Some(piece) = &mut self.piece {
                if let Some((range, micro_batch)) = piece.feed.next()? {
                    let (number, is_trial) = (piece.number, piece.is_trial);
                    piece.number += 1;
                    if let Some(generator) = &self.generator {
                        generator.begin(number);
                    }
                    let weight = self.role.weight(number, range.len());
                    let info = MicroBatchInfo { number, range, weight, is_trial };
                    return Ok(Some((info, micro_batch)));
                }
                self.piece = None;
                self.cut.watch.as_mut().map_or(Ok(()), SizeWatch::end)?;
            }
            let samples = self.cut.samples.count();
            if self.cut.next >= samples {
                return Ok(None);
            }
            let number = self.cut.sizes.len();
            let ranges = self.cut.next_piece(self.streams.device)?;
            let is_trial = ranges.iter().map(ExactSizeIterator::len).sum::<usize>() < samples;
            let feed = Feed::new(self.batch, ranges, self.streams, self.borrower)?;
            self.piece = Some(Piece { feed, number, is_trial });
        }
    }

    /// Takes the micro-batch back, with the measurements of its run.
    pub(crate) fn done(&mut self, ran: Result<MicroBatchRun>) -> Result<()> {
        let ran = match &mut self.piece {
            Some(piece) => piece.feed.done(ran)?,
            None => ran?,
        };
        self.cut.watch.as_mut().map_or(Ok(()), |watch| watch.lap(ran.unseen, ran.typical))
    }
}

/// Size of the micro-batches, or their number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MicroBatches {
    /// At most this many samples each.
    Samples(usize),
    /// This many micro-batches, or one per sample where there are fewer samples.
    Count(usize),
    /// At most this many tokens each, padding included: for [`Sequences`](crate::batch::Sequences).
    Tokens(usize),
    /// The fastest size that fits into memory, found during the first steps.
    Auto,
    /// The largest size that fits into memory.
    Largest,
}

impl MicroBatches {
    /// Cuts the samples; `None` for an automatic size.
    pub(crate) fn cut(self, samples: &Samples) -> Result<Option<Vec<Range<usize>>>> {
        Ok(Some(match (self, samples.lengths()) {
            (Self::Samples(size), _) => split::by_size(samples.count(), size)?,
            (Self::Count(count), None) => split::by_count(samples.count(), count)?,
            (Self::Count(count), Some(lengths)) => split::by_count_of_tokens(lengths, count)?,
            (Self::Tokens(tokens), Some(lengths)) => split::by_tokens(lengths, tokens)?,
            (Self::Tokens(tokens), None) => return Err(StepError::NoSequences { tokens }.into()),
            (Self::Auto | Self::Largest, _) => return Ok(None),
        }))
    }

    /// Creates a size in samples, or in tokens where samples are sequences of different lengths.
    pub(crate) fn of_units(samples: &Samples, units: usize) -> Self {
        match samples.lengths() {
            None => Self::Samples(units),
            Some(_) => Self::Tokens(units),
        }
    }

    /// Fails for micro-batches without samples, and for zero micro-batches.
    pub(crate) fn check(self) -> Result<()> {
        match self {
            Self::Tokens(tokens) => Ok(split::by_tokens(&[1], tokens).map(drop)?),
            _ => self.cut(&Samples::alike(1)).map(drop),
        }
    }

    pub(crate) fn is_automatic(self) -> bool {
        matches!(self, Self::Auto | Self::Largest)
    }
}

/// Role of a mini-batch in its step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BatchRole {
    /// Divisor of the gradients while it runs: see [`MicroBatchWeight::unit`].
    pub(crate) unit: f64,
    /// True if it has the step's first sample.
    pub(crate) first: bool,
    /// True if it begins the step in its process: no earlier mini-batch waits for the commit.
    pub(crate) begins: bool,
    /// True if the unit is the step's number of samples, and no other mini-batch follows.
    pub(crate) last: bool,
    /// Seed of the mini-batch's random numbers; without a seed, the mini-batch draws as a plain loop does.
    pub(crate) seed: Option<PartSeed>,
}

impl BatchRole {
    /// Returns the weight of one of its micro-batches.
    fn weight(self, number: usize, samples: usize) -> MicroBatchWeight {
        let first = self.first && number == 0;
        MicroBatchWeight { samples: samples as f64, unit: self.unit, first }
    }
}

/// Seed for the micro-batches of one replica or rank in one step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PartSeed {
    pub(crate) seed: u64,
    /// Number of the replica or rank.
    pub(crate) part: usize,
}

impl PartSeed {
    /// Returns the generator of its micro-batches on this device.
    pub(crate) fn on(self, device: Device) -> PartGenerator {
        PartGenerator { seed: self, generator: Generator::new(device) }
    }
}

/// The generator of one replica or rank in one step.
pub(crate) struct PartGenerator {
    seed: PartSeed,
    generator: Generator,
}

impl PartGenerator {
    /// Seeds the generator for this micro-batch.
    pub(crate) fn begin(&self, micro_batch: usize) {
        let PartSeed { seed, part } = self.seed;
        self.generator.seed(StepRng::new(seed, micro_batch).seed(part));
    }
}
