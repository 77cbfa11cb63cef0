//! What the last stage gives beside losses, brought to all ranks.

use tch::{Device, Tensor};

use super::head::{Collected, joined};
use super::ranks::Ranks;
use crate::batch::{self, Batch};
use crate::world::{Turn, WorldError};
use crate::{Error, Result};

impl Ranks {
    /// What the closure gave beside its losses, in sample order, on this device of every rank.
    pub(super) fn outputs<O: Batch>(
        &self,
        last: usize,
        device: Device,
        collected: &Collected<O>,
    ) -> Result<O> {
        if self.is_alone() {
            return joined(collected);
        }
        let mut outputs = None;
        self.together("outputs", |turn| {
            outputs = Some(self.exchanged(turn, last, device, collected)?);
            Ok(())
        })?;
        Ok(outputs.expect("all ranks have succeeded"))
    }

    fn exchanged<O: Batch>(
        &self,
        turn: &Turn,
        last: usize,
        device: Device,
        collected: &Collected<O>,
    ) -> Result<O> {
        let blank = O::blank();
        if let Some(empty) = blank.as_ref().filter(|blank| leaves(*blank).is_empty()) {
            return empty.map(&mut |leaf| Ok(leaf.tensor().shallow_clone()));
        }
        let own = if self.has(last) { some(joined(collected))? } else { None };
        let tensors = own.as_ref().map(leaves).unwrap_or_default();
        let name = std::any::type_name::<O>;
        let form = own.or(blank).ok_or_else(|| WorldError::NoForm { name: name().into() })?;
        let roots = self.in_every_pipeline(last);
        let parts = here(device, self.world.spread_in(turn, &roots, &tensors)?)?;
        let part = |tensors: Vec<Tensor>| {
            let mut tensors = tensors.into_iter();
            form.map(&mut |_| tensors.next().ok_or(Error::NothingToJoin))
        };
        batch::join(parts.into_iter().map(part).collect::<Result<Vec<O>>>()?)
    }

    /// The model's outputs, in sample order, on this device of every rank; `own` are those of this
    /// rank's last stage.
    pub(super) fn model_outputs(
        &self,
        last: usize,
        device: Device,
        own: Vec<Vec<Tensor>>,
    ) -> Result<Vec<Tensor>> {
        let own = if own.is_empty() { Vec::new() } else { batch::join(own)? };
        if self.is_alone() {
            return Ok(own);
        }
        let parts = self.world.spread(&self.in_every_pipeline(last), &own)?;
        batch::join(here(device, parts)?)
    }
}

/// The parts of pipelines that have samples. What has come from other ranks is in the host's memory.
fn here(device: Device, parts: Vec<Vec<Tensor>>) -> Result<Vec<Vec<Tensor>>> {
    let part = |part: Vec<Tensor>| part.iter().map(|tensor| tensor.f_to_device(device)).collect();
    let parts = parts.into_iter().filter(|part| !part.is_empty()).map(part);
    Ok(parts.collect::<Result<_, tch::TchError>>()?)
}

/// A pipeline without a sample has no outputs.
fn some<O>(joined: Result<O>) -> Result<Option<O>> {
    match joined {
        Ok(outputs) => Ok(Some(outputs)),
        Err(Error::NothingToJoin) => Ok(None),
        Err(error) => Err(error),
    }
}

fn leaves(batch: &impl Batch) -> Vec<Tensor> {
    batch::tensors(batch).into_iter().map(Tensor::shallow_clone).collect()
}
