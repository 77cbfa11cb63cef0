//! Hands out a mini-batch's micro-batches piece by piece.
//!
//! A given size makes one piece. An automatic one in a single memory makes several while it learns: a
//! piece is run, and what it needed and how long it took decide on the next ([`SizeWatch`]).

use std::ops::Range;

use tch::Device;

use super::role::BatchRole;
use super::size::Size;
use crate::auto::SizeWatch;
use crate::batch::{Batch, BatchError, Samples};
use crate::bytes::Bytes;
use crate::copies::Copies;
use crate::loss::MicroBatchWeight;
use crate::{Result, feed};

/// A mini-batch on its way through a device.
#[derive(Debug)]
pub(crate) struct Cut {
    samples: Samples,
    /// The first sample that has not been handed out.
    next: usize,
    /// Read only where it is given.
    size: Size,
    /// All micro-batches, where the size is given.
    given: Vec<Range<usize>>,
    /// What decides on the next piece, where it is not.
    watch: Option<SizeWatch>,
    sizes: Vec<usize>,
}

/// Which micro-batch of its mini-batch one is.
#[derive(Debug)]
pub(crate) struct MicroBatchInfo {
    pub(crate) number: usize,
    /// Its samples.
    pub(crate) range: Range<usize>,
    /// What it counts for in its step.
    pub(crate) weight: MicroBatchWeight,
    /// Whether its size is tried in a part of the mini-batch only.
    pub(crate) tried: bool,
}

/// What came of a micro-batch, besides its numbers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MicroBatchRun {
    /// In use besides what the memory's account shows.
    pub(crate) unseen: Bytes,
    /// Whether others like it will take as long.
    pub(crate) typical: bool,
}

impl MicroBatchRun {
    pub(crate) const PLAINLY: Self = Self { unseen: Bytes(0), typical: true };
}

impl Cut {
    /// These samples by a given size; none of them where there are none.
    pub(crate) fn given(samples: Samples, size: Size) -> Result<Self> {
        let given = match samples.count() {
            0 => Vec::new(),
            _ => size.cut(&samples)?.ok_or(BatchError::NothingToCut)?,
        };
        Ok(Self { samples, next: 0, size, given, watch: None, sizes: Vec::new() })
    }

    /// The same by an automatic size.
    pub(crate) fn watched(samples: Samples, size: Size, watch: SizeWatch) -> Self {
        let (given, watch) = (Vec::new(), Some(watch));
        Self { samples, next: 0, size, given, watch, sizes: Vec::new() }
    }

    /// Begins with the first sample again.
    pub(crate) fn restart(&mut self) {
        self.next = 0;
        self.sizes.clear();
        if let Some(watch) = &mut self.watch {
            watch.drop_piece();
        }
    }

    /// The size that each part is cut by, where it is given for the whole mini-batch.
    pub(crate) fn size(&self) -> Option<Size> {
        self.watch.is_none().then_some(self.size)
    }

    /// How many micro-batches there are, where that is known beforehand.
    pub(crate) fn given_count(&self) -> Option<usize> {
        self.watch.is_none().then_some(self.given.len())
    }

    /// The samples that are cut, in the order in which they are run.
    pub(crate) fn samples(&self) -> &Samples {
        &self.samples
    }

    /// The lengths of the micro-batches handed out so far.
    pub(crate) fn sizes(&self) -> &[usize] {
        &self.sizes
    }

    /// The most memory that pieces which are over have used.
    pub(crate) fn peak(&self) -> Bytes {
        self.watch.as_ref().map_or(Bytes(0), |watch| watch.peak)
    }

    pub(crate) fn into_watch(self) -> Option<SizeWatch> {
        self.watch
    }

    /// Calls `f` with each micro-batch of a mini-batch in this role in turn, on the device of the copies, where it
    /// draws its own random numbers if it has such.
    pub(crate) fn each<B: Batch>(
        &mut self,
        batch: &B,
        role: BatchRole,
        copies: &Copies,
        mut f: impl FnMut(MicroBatchInfo, B) -> Result<MicroBatchRun>,
    ) -> Result<()> {
        let generator = role.seed.map(|seed| seed.on(copies.device()));
        while self.next < self.samples.count() {
            let first = self.sizes.len();
            let ranges = self.next_piece(copies.device())?;
            // A piece of less than the mini-batch tries its size: nothing that is to last, such as a
            // captured graph, is worth preparing for it.
            let tried =
                ranges.iter().map(ExactSizeIterator::len).sum::<usize>() < self.samples.count();
            feed::each(batch, &ranges, copies, |i, micro_batch| {
                let (number, range) = (first + i, ranges[i].clone());
                if let Some(generator) = &generator {
                    generator.begin(number);
                }
                let weight = role.weight(number, range.len());
                let ran = f(MicroBatchInfo { number, range, weight, tried }, micro_batch)?;
                self.watch.as_mut().map_or(Ok(()), |watch| watch.lap(ran.unseen, ran.typical))
            })?;
            self.watch.as_mut().map_or(Ok(()), SizeWatch::end)?;
        }
        Ok(())
    }

    /// All micro-batches at once, which are to be run more than once; they must be given.
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
