//! `brimful-bench auto`: automatic micro-batch sizes compared with every fixed size.
//!
//! Measures for each model and limit: the largest size that fits, by trial; the size that `largest` finds, with
//! its failures and time; the rate of many sizes; and the result of `auto` after ten steps. A step is forward and
//! backward over the mini-batch and the reading of its loss.

mod report;
mod subject;
mod trials;

use anyhow::{Result, ensure};
use brimful::Bytes;
use brimful_cli::exit::{does_not_fit, wrong_use};
use brimful_cli::setting::{self, MODELS, ModelName, NumberType, words};
use clap::Args;
use serde_json::json;
use tch::Device;

use crate::journal::{Journal, Output};
use crate::turns::TurnProgress;
use crate::work::{GptShape, Workload};
use report::AutoRow;
use subject::LimitedWork;

/// Options of `brimful-bench auto`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  brimful-bench auto --table                        all models and limits of the project's table
  brimful-bench auto --model mlp --memory-limit 32MiB,64MiB --batch-size 4096
  brimful-bench auto --model resnet50 --device cuda --memory-limit 24GB --batch-size 2048 --steps-only
                                                    the first step, and the throughput")]
pub(crate) struct AutoOptions {
    #[arg(long, default_value = "mlp", value_name = "NAME", help = MODELS)]
    model: ModelName,
    #[arg(long, value_name = "NAME", help = words::ANY_DEVICE)]
    device: Option<String>,
    /// Memory limit of each device, such as 96MiB or 16GB
    #[arg(long, value_delimiter = ',', value_name = "BYTES,…")]
    memory_limit: Vec<Bytes>,
    /// Samples per mini-batch [default: by model and device]
    #[arg(long, value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    batch_size: Option<u32>,
    /// Precision of parameters and activations [default: tf32 on CUDA, f32 on the CPU]
    #[arg(long, value_enum)]
    dtype: Option<NumberType>,
    /// Image size in pixels [default: 224 on CUDA, 32 on the CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    image: Option<u32>,
    /// GPT shape as layers x width x sequence
    #[arg(long, value_name = "LxWxS")]
    gpt: Option<GptShape>,
    /// Measure all rows of the project's comparison: smaller ones on the CPU
    #[arg(long, conflicts_with_all = ["model", "memory_limit", "batch_size", "dtype"])]
    table: bool,
    /// Measure automatic sizes alone: the time of the first step, and the throughput after ten
    #[arg(long)]
    steps_only: bool,
    /// Run micro-batches as CUDA graphs, and convolutions in the fastest memory format
    #[arg(long, requires = "steps_only")]
    cuda_graphs: bool,
    #[command(flatten)]
    output: Output,
}

/// Measures row after row, and prints each as it comes.
pub(crate) fn run(options: &AutoOptions) -> Result<()> {
    let device = setting::device(options.device.as_deref())?;
    let rows = options.rows(device)?;
    let facts = json!({ "optimizer": "none", "cudnn_benchmark": false, "cuda_graphs": options.cuda_graphs });
    let mut journal = Journal::begin("auto", device, &options.output, facts)?;
    let progress = TurnProgress::new(rows.len());
    let mut fitted = false;
    for (work, limit) in rows {
        brimful::device::allow_tf32(work.dtype != NumberType::F32)?;
        let samples = work.samples(work.batch);
        let subject =
            LimitedWork { work, samples, device, limit, cuda_graphs: options.cuda_graphs };
        let row = AutoRow::measure(&subject, options.steps_only, &progress)?;
        progress.advance(1);
        progress.done();
        fitted |= row.fits();
        journal.enter(&row)?;
    }
    ensure!(fitted, does_not_fit("not even one sample fits: raise --memory-limit"));
    journal.end()
}

/// Rows of a table: a model, limits in MB, and mini-batches of about twice what fits.
type Rows = [(ModelName, [(u64, usize); 3])];
const ON_CPU: &Rows = &[
    (ModelName::Mlp, [(40, 2048), (60, 4096), (100, 8192)]),
    (ModelName::Resnet18, [(180, 256), (220, 256), (300, 512)]),
    (ModelName::Gpt, [(250, 16), (400, 32), (700, 64)]),
];
const ON_CUDA: &Rows = &[
    (ModelName::Resnet50, [(8_000, 192), (24_000, 576), (80_000, 2048)]),
    (ModelName::Gpt, [(8_000, 48), (24_000, 128), (80_000, 384)]),
];

impl AutoOptions {
    fn rows(&self, device: Device) -> Result<Vec<(Workload, Bytes)>> {
        if self.table {
            let table = if device == Device::Cpu { ON_CPU } else { ON_CUDA };
            let rows = table.iter().flat_map(|&(model, rows)| {
                rows.map(|(limit, batch)| {
                    (self.work(model, Some(batch), device), Bytes(limit * 1_000_000))
                })
            });
            return Ok(rows.collect());
        }
        ensure!(
            !self.memory_limit.is_empty(),
            wrong_use("give --memory-limit at least one number of bytes, or say --table")
        );
        let work = self.work(self.model, self.batch_size.map(|batch| batch as usize), device);
        Ok(self.memory_limit.iter().map(|&limit| (work.clone(), limit)).collect())
    }

    fn work(&self, model: ModelName, batch: Option<usize>, device: Device) -> Workload {
        let default = Workload::default_of(model, device);
        let image = if device == Device::Cpu { 32 } else { default.image };
        Workload {
            batch: batch.unwrap_or(default.batch),
            dtype: self.dtype.unwrap_or(default.dtype),
            image: self.image.map_or(image, i64::from),
            gpt: self.gpt.unwrap_or(default.gpt),
            ..default
        }
    }
}
