//! Measurement of layers, with a progress line.

use anyhow::Result;
use brimful::balance::{self, Profile};
use brimful::{Layers, batch::Batch, device};
use tch::{Device, Kind};

use crate::progress::{self, Progress};

/// Measures times and sizes of the layers on a device, with these inputs and parameters of this dtype.
pub(crate) fn profile(
    layers: &Layers,
    device: Device,
    inputs: &impl Batch,
    kind: Kind,
) -> Result<Profile> {
    progress::note(&format!(
        "brimful: measuring time and memory of {} layers on {}",
        layers.len(),
        device::name(device)
    ));
    let progress = Progress::new(layers.len(), "layers");
    Ok(balance::measure_of_kind(layers, device, inputs, kind, |layer| {
        progress.doing(format!("measured {}", layer.name));
        progress.advance(1);
    })?)
}
