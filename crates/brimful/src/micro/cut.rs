//! Hands out a mini-batch's micro-batches piece by piece.
//!
//! A given size makes one piece. An automatic one makes several while it learns: a piece is run,
//! and what it needed and how long it took decide on the next ([`Watch`]).

use std::ops::Range;

use tch::Device;

use super::watch::Watch;
use crate::batch::Batch;
use crate::bytes::Bytes;
use crate::copies::Copies;
use crate::{Result, feed};

/// A mini-batch on its way through the device.
#[derive(Debug)]
pub(crate) struct Cut {
    samples: usize,
    /// The first sample that has not been handed out.
    next: usize,
    pieces: Pieces,
    sizes: Vec<usize>,
}

#[derive(Debug)]
enum Pieces {
    Given(Vec<Range<usize>>),
    Watched(Box<Watch>),
}

/// A micro-batch's place in its mini-batch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub(super) number: usize,
    pub(super) samples: usize,
    /// Whether its size is tried in a part of the mini-batch only.
    pub(super) tried: bool,
}

/// What came of a micro-batch, besides its numbers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ran {
    /// In use besides what the memory's account shows.
    pub(super) unseen: Bytes,
    /// Whether others like it will take as long.
    pub(super) typical: bool,
}

impl Ran {
    pub(super) const PLAINLY: Self = Self { unseen: Bytes(0), typical: true };
}

impl Cut {
    pub(crate) fn given(ranges: Vec<Range<usize>>) -> Self {
        let samples = ranges.last().map_or(0, |last| last.end);
        Self { samples, next: 0, pieces: Pieces::Given(ranges), sizes: Vec::new() }
    }

    pub(super) fn watched(samples: usize, watch: Watch) -> Self {
        let pieces = Pieces::Watched(Box::new(watch));
        Self { samples, next: 0, pieces, sizes: Vec::new() }
    }

    /// Begins with the first sample again.
    pub(super) fn restart(&mut self) {
        self.next = 0;
        self.sizes.clear();
        if let Pieces::Watched(watch) = &mut self.pieces {
            watch.drop_piece();
        }
    }

    /// How many micro-batches there are, where that is known beforehand.
    pub(super) fn given_count(&self) -> Option<usize> {
        match &self.pieces {
            Pieces::Given(ranges) => Some(ranges.len()),
            Pieces::Watched(_) => None,
        }
    }

    pub(super) fn samples(&self) -> usize {
        self.samples
    }

    /// The lengths of the micro-batches handed out so far.
    pub(super) fn sizes(&self) -> &[usize] {
        &self.sizes
    }

    /// The most memory that pieces which are over have used.
    pub(super) fn peak(&self) -> Bytes {
        match &self.pieces {
            Pieces::Given(_) => Bytes(0),
            Pieces::Watched(watch) => watch.peak,
        }
    }

    pub(super) fn into_watch(self) -> Option<Watch> {
        match self.pieces {
            Pieces::Given(_) => None,
            Pieces::Watched(watch) => Some(*watch),
        }
    }

    /// Calls `f` with each micro-batch in turn, on the device of the copies.
    pub(super) fn each<B: Batch>(
        &mut self,
        batch: &B,
        copies: &Copies,
        mut f: impl FnMut(Place, B) -> Result<Ran>,
    ) -> Result<()> {
        while self.next < self.samples {
            let first = self.sizes.len();
            let ranges = self.next_piece(copies.device())?;
            let tried = ranges.iter().map(ExactSizeIterator::len).sum::<usize>() < self.samples;
            feed::each(batch, &ranges, copies, |i, micro_batch| {
                let place = Place { number: first + i, samples: ranges[i].len(), tried };
                let ran = f(place, micro_batch)?;
                self.lap(ran)
            })?;
            self.end_piece()?;
        }
        Ok(())
    }

    /// All micro-batches as one piece, which is to be run twice.
    pub(super) fn whole<T>(
        &mut self,
        device: Device,
        f: impl FnOnce(&[Range<usize>]) -> Result<T>,
    ) -> Result<T> {
        let ranges = match &mut self.pieces {
            Pieces::Given(ranges) => ranges.clone(),
            Pieces::Watched(watch) => watch.begin_all(self.samples, device)?,
        };
        self.hand_out(&ranges);
        let result = f(&ranges)?;
        self.lap(Ran::PLAINLY)?;
        self.end_piece()?;
        Ok(result)
    }

    fn next_piece(&mut self, device: Device) -> Result<Vec<Range<usize>>> {
        let ranges = match &mut self.pieces {
            Pieces::Given(ranges) => ranges.clone(),
            Pieces::Watched(watch) => watch.begin(self.next, self.samples, device)?,
        };
        self.hand_out(&ranges);
        Ok(ranges)
    }

    fn hand_out(&mut self, ranges: &[Range<usize>]) {
        self.next = ranges.last().map_or(self.samples, |last| last.end);
        self.sizes.extend(ranges.iter().map(ExactSizeIterator::len));
    }

    fn lap(&mut self, ran: Ran) -> Result<()> {
        match &mut self.pieces {
            Pieces::Given(_) => Ok(()),
            Pieces::Watched(watch) => watch.lap(ran),
        }
    }

    fn end_piece(&mut self) -> Result<()> {
        match &mut self.pieces {
            Pieces::Given(_) => Ok(()),
            Pieces::Watched(watch) => watch.end(),
        }
    }
}
