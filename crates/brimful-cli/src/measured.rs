//! Measurement of layers, with a progress line.

use anyhow::Result;
use brimful::balance::{self, LayerCost, Profile};
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
    let advance = begin(layers.len(), device);
    Ok(balance::measure_of_kind(layers, device, inputs, kind, advance)?)
}

/// Begins the progress line of so many layers; returns what advances it.
pub fn begin(layers: usize, device: Device) -> impl FnMut(&LayerCost) {
    progress::note(&format!(
        "brimful: measuring time and memory of {layers} layers on {}",
        device::name(device)
    ));
    let progress = Progress::new(layers, "layers");
    move |layer| {
        progress.doing(format!("measured {}", layer.name));
        progress.advance(1);
    }
}
