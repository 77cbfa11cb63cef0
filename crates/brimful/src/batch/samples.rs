//! The samples of a mini-batch as far as a cut needs to know them: how many there are, and how long each
//! is; and the order in which they are run.

use std::cmp::Reverse;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::sequences::widths;
use super::{Batch, Leaf, join, leaves, len, map_cut};
use crate::Result;
use crate::split::{self, SplitError};

/// The samples of a mini-batch, or of a part of it, in the order in which they are run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Samples {
    count: usize,
    /// In tokens, where samples are sequences of unlike length.
    lengths: Option<Vec<usize>>,
    /// Where each of the user's samples is in this order; empty where that is the user's own.
    #[serde(skip)]
    places: Vec<i64>,
}

impl Samples {
    /// So many of one length.
    pub(crate) fn alike(count: usize) -> Self {
        Self { count, ..Self::default() }
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// The tokens of each, where samples are sequences of unlike length.
    pub(crate) fn lengths(&self) -> Option<&[usize]> {
        self.lengths.as_deref()
    }

    /// What sizes are counted in: samples, or the tokens of all.
    pub(crate) fn units(&self) -> usize {
        self.lengths.as_ref().map_or(self.count, |lengths| lengths.iter().sum())
    }

    /// What a micro-batch has at least: one sample, or the longest one's tokens.
    pub(crate) fn least(&self) -> usize {
        self.lengths.iter().flatten().copied().max().unwrap_or(1)
    }

    /// What a micro-batch of these samples has, padding included.
    pub(crate) fn units_of(&self, range: &Range<usize>) -> usize {
        range.len() * self.part(range).least()
    }

    /// These samples alone.
    pub(crate) fn part(&self, range: &Range<usize>) -> Self {
        let lengths = self.lengths.as_ref().map(|lengths| lengths[range.clone()].to_vec());
        Self { count: range.len(), lengths, places: Vec::new() }
    }

    /// Micro-batches of at most so many units each; a longer sequence has one of its own.
    pub(crate) fn by_units(&self, units: usize) -> Result<Vec<Range<usize>>, SplitError> {
        match &self.lengths {
            None => split::by_size(self.count, units),
            Some(lengths) => split::by_tokens(lengths, units.max(self.least())),
        }
    }

    /// Near-equal parts for so many; the last ones have none where there are fewer samples than that.
    pub(crate) fn shares(&self, count: usize) -> Result<Vec<Range<usize>>, SplitError> {
        let mut shares = match &self.lengths {
            _ if self.count == 0 => Vec::new(),
            None => split::by_count(self.count, count)?,
            Some(lengths) => split::by_count_of_tokens(lengths, count)?,
        };
        shares.resize(count, self.count..self.count);
        Ok(shares)
    }

    /// The outputs of all parts, in the order in which these were run.
    pub(crate) fn join<B: Batch>(&self, parts: Vec<B>) -> Result<B> {
        match &self.lengths {
            None => join(parts),
            Some(_) => join(padded(parts)?),
        }
    }

    /// Outputs of all samples in the user's order. What has no row for each of them stays as it is.
    pub(crate) fn restored<B: Batch>(&self, outputs: B) -> Result<B> {
        if self.places.is_empty() {
            return Ok(outputs);
        }
        let has_rows = |leaf: &Tensor| leaf.size().first() == Some(&(self.count as i64));
        let places = Tensor::f_from_slice(&self.places)?;
        map_cut(&outputs, |leaf| match has_rows(leaf) {
            true => Ok(leaf.f_index_select(0, &places.f_to_device(leaf.device())?)?),
            false => Ok(leaf.shallow_clone()),
        })
    }

    /// A batch in the user's order, in this one.
    fn arranged<B: Batch>(&self, given: &B) -> Result<B> {
        let order = Tensor::f_from_slice(&self.places)?.f_argsort(0, false)?;
        map_cut(given, |leaf| Ok(leaf.f_index_select(0, &order.f_to_device(leaf.device())?)?))
    }
}

/// A mini-batch in the order in which it is run: the user's own, or, of sequences, the longest first, so
/// that those of like length come together and what needs the most memory does not come last.
#[derive(Debug)]
pub(crate) struct Arranged<'a, B> {
    given: &'a B,
    sorted: Option<B>,
    samples: Result<Samples>,
}

impl<'a, B: Batch> Arranged<'a, B> {
    /// What cannot be counted or sorted is refused where its samples are asked for: there, other ranks hear of it.
    pub(crate) fn of(given: &'a B) -> Self {
        match sorted(given) {
            Ok((sorted, samples)) => Self { given, sorted, samples: Ok(samples) },
            Err(error) => Self { given, sorted: None, samples: Err(error) },
        }
    }

    pub(crate) fn batch(&self) -> &B {
        self.sorted.as_ref().unwrap_or(self.given)
    }

    pub(crate) fn samples(&self) -> Result<Samples> {
        self.samples.clone()
    }

    /// What belongs to the same samples, in the same order.
    pub(crate) fn beside<'b, Y: Batch>(&self, given: &'b Y) -> Arranged<'b, Y> {
        let sorted = match &self.samples {
            Ok(samples) if !samples.places.is_empty() && len(given) == Ok(samples.count) => {
                samples.arranged(given).map(Some)
            }
            _ => Ok(None),
        };
        match sorted {
            Ok(sorted) => Arranged { given, sorted, samples: self.samples.clone() },
            Err(error) => Arranged { given, sorted: None, samples: Err(error) },
        }
    }
}

/// A mini-batch and its samples in the order in which they are run, if that is not the user's own.
fn sorted<B: Batch>(given: &B) -> Result<(Option<B>, Samples)> {
    let count = len(given)?;
    let Some(widths) = widths(given)? else { return Ok((None, Samples::alike(count))) };
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_by_key(|&sample| Reverse(widths[sample]));
    let lengths = Some(order.iter().map(|&sample| widths[sample]).collect());
    let mut places = vec![0; count];
    for (place, &sample) in order.iter().enumerate() {
        places[sample] = place as i64;
    }
    let samples = Samples { count, lengths, places };
    Ok((Some(samples.arranged(given)?), samples))
}

/// The parts with rows as wide as the widest part's.
fn padded<B: Batch>(parts: Vec<B>) -> Result<Vec<B>> {
    let width = |leaf: Leaf<'_>| leaf.tensor().size().get(1).copied().unwrap_or(0);
    let mut widest: Vec<i64> = Vec::new();
    for part in &parts {
        for (at, leaf) in leaves(part).into_iter().enumerate() {
            widest.resize(widest.len().max(at + 1), 0);
            widest[at] = widest[at].max(width(leaf));
        }
    }
    let padded = |part: B| {
        let mut widest = widest.iter();
        part.map(&mut |leaf| {
            let missing = widest.next().map_or(0, |widest| widest - width(leaf));
            match leaf {
                Leaf::Shared(tensor) => Ok(tensor.shallow_clone()),
                leaf if missing <= 0 => Ok(leaf.tensor().shallow_clone()),
                leaf => padded_by(leaf.tensor(), missing),
            }
        })
    };
    parts.into_iter().map(padded).collect()
}

/// So many more places in the second dimension, of zeros.
fn padded_by(tensor: &Tensor, missing: i64) -> Result<Tensor> {
    let mut shape = tensor.size();
    if shape.len() < 2 {
        return Ok(tensor.shallow_clone());
    }
    shape[1] = missing;
    let zeros = Tensor::f_zeros(shape, (tensor.kind(), tensor.device()))?;
    Ok(Tensor::f_cat(&[tensor, &zeros], 1)?)
}
