//! A model that the program knows, measured on the spot.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use anyhow::Result;
use brimful::balance::{Layer, Profile};
use brimful::device;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::data::{self, Synthetic};
use crate::setting::{DROPOUT, ModelName};

/// Samples that are measured together: enough to tell a sample's time from a call's.
const SAMPLES: usize = 16;
/// How long a person waits without a word.
const PATIENCE: Duration = Duration::from_secs(2);

/// The times and sizes of the model's layers on this device.
pub(super) fn measure(model: ModelName, device: &str) -> Result<Profile> {
    let device = device::find(device)?;
    let sample = model.synthetic_sample();
    let layers = model.layers(&sample, DROPOUT)?;
    let made_up = Synthetic { sample, train: SAMPLES, test: 1, seed: 0 };
    let batch = data::synthetic(&made_up)?.train.inputs;
    let progress = Progress::new(layers.len());
    let profile =
        Profile::measure_watched(&layers, device, &batch, |layer| progress.measured(layer))?;
    progress.bar.finish_and_clear();
    Ok(profile)
}

/// A bar on the terminal, once it takes long.
struct Progress {
    bar: ProgressBar,
    start: Instant,
}

impl Progress {
    fn new(layers: usize) -> Self {
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len} layers measured  {msg}");
        let bar = ProgressBar::with_draw_target(Some(layers as u64), ProgressDrawTarget::hidden());
        Self { bar: bar.with_style(style.expect("the template is right")), start: Instant::now() }
    }

    fn measured(&self, layer: &Layer) {
        let is_late = self.start.elapsed() > PATIENCE;
        if self.bar.is_hidden() && is_late && io::stderr().is_terminal() {
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        self.bar.set_message(layer.name.clone());
        self.bar.inc(1);
    }
}
