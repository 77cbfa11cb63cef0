//! Tensors that all ranks sum up, get from one, or give to the first.

use std::sync::Arc;
use std::time::Duration;

use brimful_torch::foreach;
use tch::{Device, Tensor};

use super::message::TensorOutline;
use super::{Turn, World, WorldError};
use crate::{Error, Result};

/// Channels on which a rank gives others its tensors are numbered from 2^29 on; no other channel of a
/// turn has one of these numbers.
const FIRST_SPREAD_CHANNEL: u32 = 1 << 29;

impl World {
    /// Leaves in each tensor the sum of all ranks' tensors at its place, which have the same shapes
    /// and kinds. All ranks get the same bits.
    ///
    /// # Errors
    /// When the ranks have different tensors, before any of them has changed; when a rank is lost or
    /// has ended.
    pub fn sum(&self, tensors: &[Tensor]) -> Result<()> {
        if self.size() == 1 {
            return Ok(());
        }
        self.agree_on("what is summed", tensors)?;
        let turn = self.turn()?;
        let all = self.everyone();
        // Where this rank returns early, the others would wait for its part of the ring.
        let stopping = turn.stopping();
        // Into memory of the host's, and back when all sums are there: a failure changes no tensor.
        let flat = tensors.iter().map(flat).collect::<Result<Vec<_>>>()?;
        let summing = flat.iter().zip(0..).map(|(flat, number)| turn.sum(&all, number, flat, None));
        for summing in summing.collect::<Result<Vec<_>>>()? {
            summing.wait()?;
        }
        stopping.all_went_well();
        put_back(tensors, &flat)
    }

    /// Gives each tensor the values that it has on the rank `from`.
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
        let turn = self.turn()?;
        let stopping = turn.stopping();
        let came = self.spread_in(&turn, from, &self.everyone(), tensors)?;
        stopping.all_went_well();
        put_back(tensors, &came)
    }

    /// Brings every rank's named tensors to rank 0, where all of them come back; the other ranks get
    /// their own back.
    ///
    /// # Errors
    /// When a rank has no memory for it, is lost or has ended: on all ranks.
    pub fn gather(&self, named: Vec<(String, Tensor)>) -> Result<Vec<(String, Tensor)>> {
        self.gather_told(Ok(named))
    }

    /// The same, of ranks that may have failed before: all get the error that came first.
    pub(crate) fn gather_told(
        &self,
        named: Result<Vec<(String, Tensor)>>,
    ) -> Result<Vec<(String, Tensor)>> {
        let names = named
            .as_ref()
            .map_err(Error::clone)
            .map(|named| named.iter().map(|(name, _)| name.clone()).collect::<Vec<String>>());
        let names = self.settle("gather", names, Duration::ZERO)?;
        let turn = self.turn()?;
        let gathered = named.and_then(|named| self.gather_in(&turn, named, names));
        let told = gathered.as_ref().map(drop).map_err(Error::clone);
        // What another rank's failure brings about here is dated after that.
        let at = if matches!(told, Err(Error::World(_))) { Duration::MAX } else { Duration::ZERO };
        self.settle("gathered", told, at)?;
        gathered
    }

    fn gather_in(
        &self,
        turn: &Turn,
        named: Vec<(String, Tensor)>,
        names: Vec<Vec<String>>,
    ) -> Result<Vec<(String, Tensor)>> {
        let stopping = turn.stopping();
        if self.rank() != 0 {
            let values = named.iter().map(|(_, tensor)| Some(tensor.shallow_clone()));
            turn.outlet(0, 0, 1).send(vec![values.collect()])?;
            stopping.all_went_well();
            return Ok(named);
        }
        let mut all = named;
        for (from, names) in names.into_iter().enumerate().skip(1) {
            let came = turn.inlet(from, 0, 1, None)?.take()?;
            all.extend(names.into_iter().zip(came.into_iter().flatten().flatten()));
        }
        stopping.all_went_well();
        Ok(all)
    }

    /// Gives all of these ranks the tensors of `root`, as a part of a turn, on a channel of its own.
    pub(crate) fn spread_in(
        &self,
        turn: &Turn,
        root: usize,
        ranks: &[usize],
        own: &[Tensor],
    ) -> Result<Vec<Tensor>> {
        // A channel's number is that of its root: several may be spread in one turn.
        let channel = FIRST_SPREAD_CHANNEL + root as u32;
        if root != self.rank() {
            let came = turn.inlet(root, channel, 1, None)?.take()?;
            return Ok(came.into_iter().flatten().flatten().collect());
        }
        // Copied once, not for each of the others.
        let host = own.iter().map(on_host).collect::<Result<Vec<_>>>()?;
        let parcel = || vec![host.iter().map(|tensor| Some(tensor.shallow_clone())).collect()];
        for to in ranks.iter().filter(|rank| **rank != root) {
            turn.outlet(*to, channel, 1).send(parcel())?;
        }
        Ok(own.iter().map(Tensor::shallow_clone).collect())
    }

    /// Makes sure that all ranks have tensors of the same kinds and shapes. Numbers that are missing
    /// in one of them would be taken from whatever its memory held.
    fn agree_on(&self, what: &str, tensors: &[Tensor]) -> Result<()> {
        let row = tensors.iter().map(|tensor| Some(tensor.shallow_clone())).collect();
        let outline = TensorOutline::of(&vec![row]).map(|outline| outline.to_string());
        Ok(WorldError::check_same(what, self.settle(what, outline, Duration::ZERO)?)?)
    }

    /// All ranks, in order.
    pub(crate) fn everyone(&self) -> Arc<[usize]> {
        (0..self.size()).collect()
    }
}

/// The numbers in one piece of the host's memory: the tensor itself where they are.
fn flat(tensor: &Tensor) -> Result<Tensor> {
    Ok(tensor.f_detach()?.f_to_device(Device::Cpu)?.f_contiguous()?)
}

/// The same, with a gradient where the tensor has one.
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
