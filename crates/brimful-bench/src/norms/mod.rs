//! `brimful-bench norms`: exact BatchNorms, with the statistics of the whole mini-batch, against deferred ones.
//!
//! All contestants train one model in the same micro-batches. Deferred BatchNorms normalise each micro-batch by
//! itself, which is the plain step; exact ones have a barrier across all micro-batches before every BatchNorm.
//! Within a memory limit, which the activations held at the barriers may exceed, only the exact ones run.

mod contest;
mod exact;
mod report;

use anyhow::{Result, ensure};
use brimful::Bytes;
use brimful::memory::Memory;
use brimful_cli::exit::wrong_use;
use brimful_cli::setting::{self, MODELS, ModelName, NumberType, words};
use clap::Args;
use serde_json::json;
use tch::Device;

use crate::journal::{Journal, Output};
use crate::timed;
use crate::turns::TurnProgress;
use crate::work::Workload;
use contest::NormContest;
use report::NormRows;

/// Options of `brimful-bench norms`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  brimful-bench norms --device cuda:0 --dtype bf16
  brimful-bench norms --device cuda:0 --dtype bf16 --batch-size 512,4096 --memory-limit 8GB
  brimful-bench norms --device cpu --model resnet18 --image 32 --batch-size 32 --micro-batch-size 8")]
pub(crate) struct NormsOptions {
    #[arg(long, default_value = "resnet50", value_name = "NAME", help = MODELS)]
    model: ModelName,
    #[arg(long, value_name = "NAME", help = words::ANY_DEVICE)]
    device: Option<String>,
    /// Precision of parameters and activations [default: tf32 on CUDA, f32 on the CPU]
    #[arg(long, value_enum)]
    dtype: Option<NumberType>,
    /// Samples per mini-batch: one row per number [default: 512 on CUDA, 16 on the CPU]
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = words::count)]
    batch_size: Vec<usize>,
    /// Samples per micro-batch [default: 64 on CUDA, 4 on the CPU]
    #[arg(long = "micro-batch-size", value_name = "N", value_parser = words::count)]
    micro_batch: Option<usize>,
    /// Image size in pixels [default: 224 on CUDA, 64 on the CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    image: Option<u32>,
    /// Measured steps of each contestant
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = words::count)]
    repeats: usize,
    #[arg(long, value_name = "BYTES", help = words::MEMORY_LIMIT)]
    memory_limit: Option<Bytes>,
    #[command(flatten)]
    output: Output,
}

/// Measures mini-batch after mini-batch, and prints the rows of each as they come.
pub(crate) fn run(options: &NormsOptions) -> Result<()> {
    let device = setting::device(options.device.as_deref())?;
    let works = options.works(device)?;
    works[0].dtype.prepare(device)?;
    let cuda = timed::try_kernels(device);
    if cuda {
        Memory::of(device)?.set_limit(options.memory_limit.map(|limit| limit.0))?;
    }
    let facts = json!({ "cudnn_benchmark": cuda, "optimizer": "none", "channels_last": cuda });
    let mut journal = Journal::begin("norms", device, &options.output, facts)?;
    let progress = TurnProgress::new(works.len() * timed::turns(options.repeats));
    let mut rows = NormRows { limit: options.memory_limit, peaks: Vec::new() };
    for work in &works {
        progress.row(&work.title());
        let mut contest = NormContest::new(work, device, options.memory_limit)?;
        let all = contest.take_turns(options.repeats, &progress)?;
        progress.done();
        rows.enter(work, &all, &mut journal)?;
    }
    journal.end()
}

impl NormsOptions {
    /// Returns the works to run: one per mini-batch size.
    fn works(&self, device: Device) -> Result<Vec<Workload>> {
        use ModelName::{AmoebaNet, Resnet18, Resnet50, Resnet101};
        let model = self.model;
        ensure!(
            matches!(model, Resnet18 | Resnet50 | Resnet101 | AmoebaNet { .. }),
            wrong_use(format!(
                "exact BatchNorms are those of resnet18, resnet50, resnet101 and amoebanet:LxF, and --model \
                 is {model}"
            ))
        );
        let usual = Workload::default_of(model, device);
        let work = Workload {
            dtype: self.dtype.unwrap_or(usual.dtype),
            micro_batch: self.micro_batch.unwrap_or(usual.micro_batch),
            image: self.image.map_or(usual.image, i64::from),
            ..usual
        };
        let given = self.batch_size.iter().copied();
        let batches = if self.batch_size.is_empty() { vec![work.batch] } else { given.collect() };
        Ok(batches.into_iter().map(|batch| Workload { batch, ..work.clone() }).collect())
    }
}
