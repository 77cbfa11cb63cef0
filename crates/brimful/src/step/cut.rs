//! Hands out a mini-batch's micro-batches piece by piece.
//!
//! A given size makes one piece. An automatic size in a single memory makes several while it learns: the memory
//! and time that a piece takes decide on the next ([`SizeWatch`]).

use std::ops::Range;

use tch::Device;

use super::micro_batches::MicroBatches;
use super::role::BatchRole;
use crate::auto::SizeWatch;
use crate::batch::{Batch, BatchError, Samples};
use crate::copy_streams::CopyStreams;
use crate::loss::MicroBatchWeight;
use crate::{Result, feed};
use brimful_plan::bytes::Bytes;

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

    /// Calls `f` with each micro-batch in order, on the device of the copies. Where the role has a seed, each
    /// micro-batch draws from a generator of its own.
    pub(crate) fn each<B: Batch>(
        &mut self,
        batch: &B,
        role: BatchRole,
        streams: &CopyStreams,
        mut f: impl FnMut(MicroBatchInfo, B) -> Result<MicroBatchRun>,
    ) -> Result<()> {
        let generator = role.seed.map(|seed| seed.on(streams.device()));
        while self.next < self.samples.count() {
            let first = self.sizes.len();
            let ranges = self.next_piece(streams.device())?;
            // A piece that is less than the mini-batch tries out its size, for which a capture, for example,
            // is not worthwhile.
            let is_trial =
                ranges.iter().map(ExactSizeIterator::len).sum::<usize>() < self.samples.count();
            feed::each(batch, &ranges, streams, |i, micro_batch| {
                let (number, range) = (first + i, ranges[i].clone());
                if let Some(generator) = &generator {
                    generator.begin(number);
                }
                let weight = role.weight(number, range.len());
                let ran = f(MicroBatchInfo { number, range, weight, is_trial }, micro_batch)?;
                self.watch.as_mut().map_or(Ok(()), |watch| watch.lap(ran.unseen, ran.typical))
            })?;
            self.watch.as_mut().map_or(Ok(()), SizeWatch::end)?;
        }
        Ok(())
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
