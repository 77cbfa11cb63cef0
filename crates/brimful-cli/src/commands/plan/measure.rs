//! A model that the program knows, measured on the spot.

use anyhow::Result;
use brimful::balance::Profile;
use brimful::device;
use tch::Kind;

use crate::data::{self, Synthetic};
use crate::measured;
use crate::setting::{DROPOUT, ModelName};

/// Samples that are measured together: enough to tell a sample's time from a call's.
const SAMPLES: usize = 16;

/// The times and sizes of the model's layers on this device.
pub(super) fn measure(model: ModelName, device: &str) -> Result<Profile> {
    let device = device::find(device)?;
    let sample = model.synthetic_sample();
    let layers = model.layers(&sample, DROPOUT)?;
    let made_up = Synthetic { sample, train: SAMPLES, test: 1, seed: 0 };
    let batch = data::synthetic(&made_up)?.train.all()?.inputs;
    let kind = if batch.is_floating_point() { batch.kind() } else { Kind::Float };
    measured::profile(&layers, device, &batch, kind)
}
