//! Layers measured on the spot, with a line of progress.

use anyhow::Result;
use brimful::balance::{self, Profile};
use brimful::{Layers, batch::Batch};
use tch::{Device, Kind};

use crate::progress::Progress;

/// The times and sizes of the layers on this device, with these inputs and parameters of this number type.
pub(crate) fn profile(
    layers: &Layers,
    device: Device,
    inputs: &impl Batch,
    kind: Kind,
) -> Result<Profile> {
    let progress = Progress::new(layers.len(), "layers");
    Ok(balance::measure_of_kind(layers, device, inputs, kind, |layer| {
        progress.doing(format!("measured {}", layer.name));
        progress.advance(1);
    })?)
}
