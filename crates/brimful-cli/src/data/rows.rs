//! Samples of a mini-batch as an engine takes them: of one size, or sequences that are cut by tokens.

use std::ops::Deref;

use brimful::Result;
use brimful::batch::{Batch, Leaf, Sequences};
use tch::{Kind, Tensor};

use crate::setting::typed;

/// Step of micro-batch widths. If it does not divide the limit on a sample's length, the next smaller number that does
/// takes its place.
const STEP: i64 = 64;

/// Inputs or targets of a mini-batch.
#[derive(Debug)]
pub(crate) enum Rows {
    /// Rows of one size.
    Alike(Tensor),
    /// Sequences, cut by tokens; each micro-batch is as wide as its own longest sequence needs.
    Unlike(Sequences),
}

impl Rows {
    /// Makes sequences of the first `lengths` positions of each row, padded with `padding`. None is longer than
    /// `most`.
    pub(super) fn unlike(rows: &Tensor, lengths: &[i64], most: i64, padding: i64) -> Result<Self> {
        if lengths.is_empty() {
            return Ok(Self::Alike(rows.shallow_clone()));
        }
        let row = |(number, length): (usize, &i64)| {
            Ok(rows.f_get(number as i64)?.f_narrow(0, 0, *length)?)
        };
        let rows = lengths.iter().enumerate().map(row).collect::<Result<Vec<_>>>()?;
        // Keeps widths within `most`, the number of a model's positions.
        let step = (1..=STEP).rev().find(|step| most % step == 0).unwrap_or(1);
        Ok(Self::Unlike(Sequences::in_steps_of(step as usize, &rows, padding as f64)?))
    }

    /// Converts rows to the model's dtype, unless they are tokens.
    pub(crate) fn typed(self, kind: Kind) -> Self {
        match self {
            Self::Alike(rows) => Self::Alike(typed(&rows, kind)),
            unlike => unlike,
        }
    }
}

impl Deref for Rows {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        match self {
            Self::Alike(rows) => rows,
            Self::Unlike(rows) => rows,
        }
    }
}

impl Batch for Rows {
    fn visit<'a>(&'a self, f: &mut dyn FnMut(Leaf<'a>)) {
        match self {
            Self::Alike(rows) => rows.visit(f),
            Self::Unlike(rows) => rows.visit(f),
        }
    }

    fn map(&self, f: &mut dyn FnMut(Leaf<'_>) -> Result<Tensor>) -> Result<Self> {
        Ok(match self {
            Self::Alike(rows) => Self::Alike(rows.map(f)?),
            Self::Unlike(rows) => Self::Unlike(rows.map(f)?),
        })
    }
}

#[cfg(test)]
mod tests {
    use brimful::{MicroBatcher, MicroBatches};
    use tch::Device;
    use tch::nn::VarStore;

    use super::*;

    #[test]
    fn micro_batches_are_as_wide_as_their_own_longest_and_no_wider_than_a_sample_may_be() {
        let tokens = Tensor::ones([3, 90], (Kind::Int64, Device::Cpu));
        let rows = Rows::unlike(&tokens, &[3, 90, 60], 100, 0).expect("rows");
        assert_eq!(rows.size(), [3, 100]);
        let store = VarStore::new(Device::Cpu);
        let mut widths = Vec::new();
        let sums = MicroBatcher::new(&store, MicroBatches::Samples(1)).map(&rows, |part: Rows| {
            widths.push(part.size()[1]);
            part.sum_dim_intlist([1_i64].as_slice(), false, Kind::Int64)
        });
        assert_eq!(widths, [100, 100, 50]);
        assert_eq!(sums.expect("sums"), Tensor::from_slice(&[3_i64, 90, 60]));
    }
}
