//! Collectives on tensors: all-reduce, broadcast, and gather on the first rank.

use std::sync::Arc;
use std::time::Duration;

use brimful_torch::foreach;
use tch::{Device, Tensor};

use super::message::TensorOutline;
use super::{Collective, World, WorldError};
use crate::{Error, Result};

/// First channel number of broadcasts: rank *r* sends on this number plus *r*. Other channels of a collective do not
/// have these numbers.
const FIRST_SPREAD_CHANNEL: u32 = 1 << 29;

impl World {
    /// Replaces each tensor by the sum over all ranks (an all-reduce). Shapes and dtypes must be the same on all
    /// ranks, and all ranks get the same bits.
    ///
    /// # Errors
    /// When the ranks have different tensors, before any of them has changed; when a rank is lost or has
    /// ended.
    pub fn sum(&self, tensors: &[Tensor]) -> Result<()> {
        if self.size() == 1 {
            return Ok(());
        }
        self.agree_on("what is summed", tensors)?;
        let collective = self.collective()?;
        let all = self.everyone();
        // If this rank returned early, the other ranks would wait for its part of the ring.
        let stopping = collective.stopping();
        // Summed in host memory and copied back when all sums are complete: a failure changes no tensor.
        let flat = tensors.iter().map(flat).collect::<Result<Vec<_>>>()?;
        let summing =
            flat.iter().zip(0..).map(|(flat, number)| collective.sum(&all, number, flat, None));
        for summing in summing.collect::<Result<Vec<_>>>()? {
            summing.wait()?;
        }
        stopping.all_went_well();
        put_back(tensors, &flat)
    }

    /// Replaces the tensors of all ranks by those of rank `from`.
    ///
    /// # Errors
    /// When there is no such rank; when the ranks have different tensors, before any of them has
    /// changed; when a rank is lost or has ended.
    pub fn broadcast(&self, tensors: &[Tensor], from: usize) -> Result<()> {
        if from >= self.size() {
            return Err(WorldError::NoRank { rank: from, size: self.size() }.into());
        }
        // Compared first, because a difference found half-way would leave some ranks changed.
        self.agree_on("what is broadcast", tensors)?;
        let collective = self.collective()?;
        let stopping = collective.stopping();
        let came = self.spread_in(&collective, from, &self.everyone(), tensors)?;
        stopping.all_went_well();
        put_back(tensors, &came)
    }

    /// Gathers every rank's named tensors on rank 0, which gets all of them. Every other rank gets its own tensors
    /// back.
    ///
    /// # Errors
    /// When a rank runs out of memory, is lost or has ended. All ranks then get an error.
    pub fn gather(&self, named: Vec<(String, Tensor)>) -> Result<Vec<(String, Tensor)>> {
        self.gather_told(Ok(named))
    }

    /// Gathers as [`World::gather`] does. If some ranks have failed before, all ranks get the earliest
    /// error.
    pub(crate) fn gather_told(
        &self,
        named: Result<Vec<(String, Tensor)>>,
    ) -> Result<Vec<(String, Tensor)>> {
        let names = named
            .as_ref()
            .map_err(Error::clone)
            .map(|named| named.iter().map(|(name, _)| name.clone()).collect::<Vec<String>>());
        let names = self.vote("gather", names, Duration::ZERO)?;
        let collective = self.collective()?;
        let gathered = named.and_then(|named| self.gather_in(&collective, named, names));
        let reported = gathered.as_ref().map(drop).map_err(Error::clone);
        // An error that another rank's failure causes here counts as later than that failure.
        let at =
            if matches!(reported, Err(Error::World(_))) { Duration::MAX } else { Duration::ZERO };
        self.vote("gathered", reported, at)?;
        gathered
    }

    fn gather_in(
        &self,
        collective: &Collective,
        named: Vec<(String, Tensor)>,
        names: Vec<Vec<String>>,
    ) -> Result<Vec<(String, Tensor)>> {
        let stopping = collective.stopping();
        if self.rank() != 0 {
            let values = named.iter().map(|(_, tensor)| Some(tensor.shallow_clone()));
            collective.outlet(0, 0, 1).send(vec![values.collect()])?;
            stopping.all_went_well();
            return Ok(named);
        }
        let mut all = named;
        for (from, names) in names.into_iter().enumerate().skip(1) {
            let came = collective.inlet(from, 0, 1, None)?.take()?;
            all.extend(names.into_iter().zip(came.into_iter().flatten().flatten()));
        }
        stopping.all_went_well();
        Ok(all)
    }

    /// Broadcasts the tensors of `root` to these ranks within a collective, on a separate channel.
    pub(crate) fn spread_in(
        &self,
        collective: &Collective,
        root: usize,
        ranks: &[usize],
        own: &[Tensor],
    ) -> Result<Vec<Tensor>> {
        // The channel's number depends on the root, because several broadcasts may share a collective.
        let channel = FIRST_SPREAD_CHANNEL + root as u32;
        if root != self.rank() {
            let came = collective.inlet(root, channel, 1, None)?.take()?;
            return Ok(came.into_iter().flatten().flatten().collect());
        }
        // Copied once, not for each of the other ranks.
        let host = own.iter().map(on_host).collect::<Result<Vec<_>>>()?;
        let message = || vec![host.iter().map(|tensor| Some(tensor.shallow_clone())).collect()];
        for to in ranks.iter().filter(|rank| **rank != root) {
            collective.outlet(*to, channel, 1).send(message())?;
        }
        Ok(own.iter().map(Tensor::shallow_clone).collect())
    }

    /// Checks that all ranks have tensors of the same dtypes and shapes. Otherwise the missing elements
    /// would be read from uninitialised memory.
    fn agree_on(&self, what: &str, tensors: &[Tensor]) -> Result<()> {
        let row = tensors.iter().map(|tensor| Some(tensor.shallow_clone())).collect();
        let outline = TensorOutline::of(&vec![row]).map(|outline| outline.to_string());
        Ok(WorldError::check_same(what, self.vote(what, outline, Duration::ZERO)?)?)
    }

    /// Returns all ranks, in order.
    pub(crate) fn everyone(&self) -> Arc<[usize]> {
        (0..self.size()).collect()
    }
}

/// Returns the tensor as contiguous memory of the host; the same tensor if it already is.
fn flat(tensor: &Tensor) -> Result<Tensor> {
    Ok(tensor.f_detach()?.f_to_device(Device::Cpu)?.f_contiguous()?)
}

/// Returns the tensor in host memory, with its `requires_grad`.
fn on_host(tensor: &Tensor) -> Result<Tensor> {
    Ok(flat(tensor)?.f_set_requires_grad(tensor.requires_grad())?)
}

fn put_back(tensors: &[Tensor], values: &[Tensor]) -> Result<()> {
    let detached = tensors.iter().map(Tensor::f_detach).collect::<Result<Vec<_>, _>>()?;
    let moved = |(into, from): &(Tensor, &Tensor)| into.data_ptr() != from.data_ptr();
    let (into, from): (Vec<_>, Vec<_>) = detached
        .into_iter()
        .zip(values)
        .filter(moved)
        .map(|(into, from)| (into, from.shallow_clone()))
        .unzip();
    Ok(foreach::copy(&into, &from)?)
}
