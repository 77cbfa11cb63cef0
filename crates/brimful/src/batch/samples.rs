//! Number and lengths of a mini-batch's samples, as a cut needs them, and the order in which they run.

use std::cmp::Reverse;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::{Batch, Leaf, join, leaves, len, map_cut, numbers};
use crate::Result;
use brimful_plan::split::{self, SplitError};

/// Samples of a mini-batch, or of a part of it, in the order in which they run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Samples {
    count: usize,
    /// Tokens of each sample, if samples are sequences of different lengths.
    lengths: Option<Vec<usize>>,
    /// Position of each of the user's samples in this order; empty if the order is the user's own.
    #[serde(skip)]
    places: Vec<i64>,
}

impl Samples {
    /// Creates this many samples of one length.
    pub(crate) fn alike(count: usize) -> Self {
        Self { count, ..Self::default() }
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Returns the tokens of each sample, if samples are sequences of different lengths.
    pub(crate) fn lengths(&self) -> Option<&[usize]> {
        self.lengths.as_deref()
    }

    /// Returns the total in the unit of sizes: samples, or tokens.
    pub(crate) fn units(&self) -> usize {
        self.lengths.as_ref().map_or(self.count, |lengths| lengths.iter().sum())
    }

    /// Returns the smallest size of a micro-batch: one sample, or the tokens of the longest one.
    pub(crate) fn least(&self) -> usize {
        self.lengths.iter().flatten().copied().max().unwrap_or(1)
    }

    /// Returns the size of a micro-batch of these samples, padding included.
    pub(crate) fn units_of(&self, range: &Range<usize>) -> usize {
        range.len() * self.part(range).least()
    }

    /// Returns the samples of this range only.
    pub(crate) fn part(&self, range: &Range<usize>) -> Self {
        let lengths = self.lengths.as_ref().map(|lengths| lengths[range.clone()].to_vec());
        Self { count: range.len(), lengths, places: Vec::new() }
    }

    /// Cuts micro-batches of at most this many units each, or of the longest sequence's tokens if these are more.
    pub(crate) fn by_units(&self, units: usize) -> Result<Vec<Range<usize>>, SplitError> {
        match &self.lengths {
            None => split::by_size(self.count, units),
            Some(lengths) => split::by_tokens(lengths, units.max(self.least())),
        }
    }

    /// Cuts this many near-equal parts; if there are fewer samples than parts, the last parts are empty.
    pub(crate) fn shares(&self, count: usize) -> Result<Vec<Range<usize>>, SplitError> {
        let mut shares = match &self.lengths {
            _ if self.count == 0 => Vec::new(),
            None => split::by_count(self.count, count)?,
            Some(lengths) => split::by_count_of_tokens(lengths, count)?,
        };
        shares.resize(count, self.count..self.count);
        Ok(shares)
    }

    /// Joins the outputs of all parts, in the order in which they ran.
    pub(crate) fn join<B: Batch>(&self, parts: Vec<B>) -> Result<B> {
        match &self.lengths {
            None => join(parts),
            Some(_) => join(padded(parts)?),
        }
    }

    /// Sorts outputs of all samples into the user's order. Outputs without a row for each sample stay as they
    /// are.
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

    /// Sorts a batch from the user's order into the order in which the samples run.
    fn arranged<B: Batch>(&self, given: &B) -> Result<B> {
        let order = Tensor::f_from_slice(&self.places)?.f_argsort(0, false)?;
        map_cut(given, |leaf| Ok(leaf.f_index_select(0, &order.f_to_device(leaf.device())?)?))
    }
}

/// A mini-batch in the order in which it runs: the user's own, or, for sequences, the longest first. So
/// sequences of similar length are together, and the micro-batches that need the most memory come first.
#[derive(Debug)]
pub(crate) struct Arranged<'a, B> {
    given: &'a B,
    sorted: Option<B>,
    samples: Result<Samples>,
}

impl<'a, B: Batch> Arranged<'a, B> {
    /// Sorts a mini-batch. Errors of counting or sorting are kept until the samples are requested, so that they
    /// are reported to other ranks too.
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

    /// Sorts another batch of the same samples, such as targets, into the same order.
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

/// Returns the sorted mini-batch, if its order is not the user's own, and its samples.
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

/// Returns the width of each sample, which is that of its widest sequence; `None` without sequences.
fn widths(batch: &impl Batch) -> Result<Option<Vec<usize>>> {
    let mut all: Option<Tensor> = None;
    for leaf in leaves(batch) {
        let Leaf::Widths(widths) = leaf else { continue };
        all = Some(all.map_or(Ok(widths.shallow_clone()), |all| all.f_maximum(widths))?);
    }
    let Some(all) = all else { return Ok(None) };
    Ok(Some(numbers(&all)?.into_iter().map(|width| width as usize).collect()))
}

/// Pads the rows of all parts to the width of the widest part.
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

/// Appends this many zeros in the second dimension.
fn padded_by(tensor: &Tensor, missing: i64) -> Result<Tensor> {
    let mut shape = tensor.size();
    if shape.len() < 2 {
        return Ok(tensor.shallow_clone());
    }
    shape[1] = missing;
    let zeros = Tensor::f_zeros(shape, (tensor.kind(), tensor.device()))?;
    Ok(Tensor::f_cat(&[tensor, &zeros], 1)?)
}
