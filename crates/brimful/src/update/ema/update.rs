//! Update of the averages: all that can fail first, then the update itself, which allocates nothing.

use brimful_torch::foreach;
use tch::{Device, Kind, Tensor};

use super::{Average, EmaPart, values, weights};
use crate::Result;
use crate::update::OptimError;
use crate::update::scratch::{ScratchPiece, convert, scratch_elements, scratch_for};

/// Weights whose dtype or strides differ from their averages', converted together per dtype and device.
type Converted<'a> = ScratchPiece<(Kind, Device), &'a Average>;

impl EmaPart {
    /// Allocates the scratch space for weights that must be converted. All that can fail is here.
    pub(crate) fn prepare(&self) -> Result<Vec<Tensor>> {
        match self.own {
            None => scratch_for(self.converted().iter().map(|piece| (piece.key, piece.scratch))),
            Some(_) => Err(OptimError::AveragesInPlace.into()),
        }
    }

    /// Updates the averages without allocating.
    pub(crate) fn commit(&mut self, scratch: &[Tensor], decay: f64) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let alike: Vec<_> = self.averaged().filter(|average| average.is_alike()).collect();
        follow(&alike, &weights(alike.iter().copied())?, decay)?;
        for Converted { items, key: (kind, _), .. } in self.converted() {
            let like: Vec<_> = items.iter().map(|average| &average.value).collect();
            let weights = weights(items.iter().copied())?;
            follow(&items, &convert(&weights, &like, kind, scratch)?, decay)?;
        }
        let copied = || self.averages.iter().filter(|copied| !copied.is_averaged());
        Ok(foreach::copy(&values(copied()), &weights(copied())?)?)
    }

    fn averaged(&self) -> impl Iterator<Item = &Average> {
        self.averages.iter().filter(|average| average.is_averaged())
    }

    /// Returns the averages whose weights must be converted, in pieces.
    fn converted(&self) -> Vec<Converted<'_>> {
        let mut pieces = Vec::new();
        for average in self.averaged().filter(|average| !average.is_alike()) {
            let place = (average.value.kind(), average.value.device());
            ScratchPiece::put(&mut pieces, place, average, scratch_elements(&average.value));
        }
        pieces
    }
}

fn follow(averages: &[&Average], weights: &[Tensor], decay: f64) -> Result<()> {
    let values = values(averages.iter().copied());
    foreach::scale(&values, decay)?;
    Ok(foreach::add(&values, weights, 1.0 - decay)?)
}
