//! Collects the last stage's outputs on all ranks that need them.

use std::ops::Range;

use tch::{Device, Tensor};

use super::{Collected, joined};
use crate::Result;
use crate::batch::{self, Batch, BatchError, Samples};
use crate::pipeline::ranks::Ranks;
use crate::step::Exchange;
use crate::world::WorldError;

impl Ranks {
    /// Returns the closure's outputs in sample order. In a pipeline of several ranks, every rank gets them on its
    /// `device`.
    pub(crate) fn outputs<O: Batch>(
        &self,
        exchange: &Exchange,
        last: usize,
        device: Device,
        collected: &Collected<O>,
        samples: &Samples,
    ) -> Result<O> {
        let blank = O::blank();
        // All ranks know from the type alone that there is no tensor, so all of them skip the exchange.
        if let Some(empty) = blank.as_ref().filter(|blank| batch::leaves(*blank).is_empty()) {
            return empty.map(&mut |leaf| Ok(leaf.tensor().shallow_clone()));
        }
        let own = if self.has(last) { joined(collected, samples)? } else { None };
        let leaves = own.iter().flat_map(batch::leaves);
        let tensors: Vec<Tensor> = leaves.map(|leaf| leaf.tensor().shallow_clone()).collect();
        let name = std::any::type_name::<O>;
        let form = own.or(blank).ok_or_else(|| WorldError::NoForm { name: name().into() })?;
        let ranks: Vec<usize> = self.of_pipeline().collect();
        let came = self.world().spread_in(&exchange.collective, self.of(last), &ranks, &tensors)?;
        // Without a sample, the last stage's rank sends an empty list, because the other ranks wait for a list.
        if came.is_empty() {
            return Ok(form);
        }
        let mut came = came.into_iter();
        form.map(&mut |_| {
            let tensor = came.next().ok_or(BatchError::NothingToJoin)?;
            Ok(tensor.f_to_device(device)?)
        })
    }

    /// Returns the model outputs of all replicas, in sample order and on `device`, and the range of the rows of
    /// this rank's replica. Every rank gets all outputs. `own` has the outputs of this rank's last stage, by
    /// micro-batch.
    pub(crate) fn model_outputs(
        &self,
        exchange: &Exchange,
        last: usize,
        device: Device,
        own: Vec<Vec<Tensor>>,
        samples: &Samples,
    ) -> Result<(Vec<Tensor>, Range<usize>)> {
        let own = if own.is_empty() { Vec::new() } else { samples.join(own)? };
        if self.is_alone() {
            let rows = rows(&own);
            return Ok((own, 0..rows));
        }
        let everyone = self.world().everyone();
        let mut parts = Vec::new();
        let mut start = 0;
        let mut mine = 0..0;
        for (replica, root) in self.in_every_pipeline(last).into_iter().enumerate() {
            let part = self.world().spread_in(&exchange.collective, root, &everyone, &own)?;
            let end = start + rows(&part);
            if replica == self.replica() {
                mine = start..end;
            }
            if !part.is_empty() {
                // Tensors from other ranks arrive in host memory.
                let here = part.iter().map(|tensor| tensor.f_to_device(device));
                parts.push(here.collect::<Result<Vec<_>, _>>()?);
            }
            start = end;
        }
        Ok((samples.join(parts)?, mine))
    }
}

/// Returns the number of rows of these outputs.
fn rows(outputs: &[Tensor]) -> usize {
    let first = outputs.first().map(Tensor::size).unwrap_or_default();
    first.first().map_or(0, |rows| *rows as usize)
}
