//! Extra time of the first step with custom kernels, in which they are compiled or read from the cache.
//!
//! Steps with libtorch's kernels run before, so that cuDNN has chosen its algorithms and the allocator has filled
//! its cache.

use anyhow::Result;
use brimful_cli::setting::{ModelName, NumberType};
use brimful_torch::kernels;
use serde::Serialize;
use tch::Device;

use crate::columns::Columns;
use crate::timed::{self, MeasuredTurn, compute_the_same, share};
use crate::tuned::{TunedModel, Tuning};
use crate::turns::TurnProgress;
use crate::work::Workload;

/// Number of steps with libtorch's kernels, and then with ours.
const LIBTORCHS: usize = 2;
const OURS: usize = 3;
/// Number of all steps.
pub(super) const STEPS: usize = LIBTORCHS + OURS;

/// First step with custom kernels beside the third.
#[derive(Debug, Serialize)]
pub(super) struct FirstUseRow {
    part: &'static str,
    #[serde(flatten)]
    columns: Columns,
    /// Kernels of our steps; on a CPU, these are libtorch's.
    kernels: String,
    /// Seconds of the last step with libtorch's kernels.
    libtorch_seconds: f64,
    first_seconds: f64,
    third_seconds: f64,
    /// First step's seconds minus the third's.
    first_use_seconds: f64,
    loss: f64,
}

/// Trains a ResNet-50 for a few steps.
pub(super) fn measure(
    dtype: NumberType,
    device: Device,
    progress: &TurnProgress,
) -> Result<FirstUseRow> {
    let work = work(dtype, device);
    progress.row(&work.title());
    let wanted = kernels::enabled();
    kernels::set_enabled(false);
    let mut model =
        TunedModel::new(&work, device, Tuning { cuda_graphs: false, channels_last: true })?;
    let batch = work.samples(work.batch);
    let mut steps = |what: &str, count| -> Result<Vec<MeasuredTurn>> {
        let step = |turn| {
            progress.turn("resnet50", what, turn, 0, count);
            let measured = timed::turn(&mut model, device, || share(&batch), TunedModel::step)?;
            progress.advance(1);
            Ok(measured)
        };
        (0..count).map(step).collect()
    };
    let libtorchs = steps("libtorch's kernels", LIBTORCHS)?;
    kernels::set_enabled(wanted);
    let ours = steps("kernels of our own", OURS)?;
    progress.done();
    compute_the_same(libtorchs.iter().chain(&ours).map(|turn| turn.loss), dtype)?;
    let (first, third) = (ours[0].seconds, ours[OURS - 1].seconds);
    Ok(FirstUseRow {
        part: "first use",
        columns: Columns::new("brimful", &work),
        // Read only now: the query loads the compiler, which is part of the first use.
        kernels: kernels::state(device).to_string(),
        libtorch_seconds: libtorchs[LIBTORCHS - 1].seconds,
        first_seconds: first,
        third_seconds: third,
        first_use_seconds: first - third,
        loss: ours[0].loss,
    })
}

fn work(dtype: NumberType, device: Device) -> Workload {
    let (images, image) = if device == Device::Cpu { (2, 64) } else { (16, 224) };
    let usual = Workload::default_of(ModelName::Resnet50, device);
    Workload { dtype, batch: images, micro_batch: images, image, ..usual }
}
