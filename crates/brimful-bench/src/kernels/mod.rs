//! `brimful-bench kernels`: a head's loss compared with libtorch's, and the cost of the first use of custom
//! kernels.
//!
//! The first use is measured first: running any custom kernel compiles others ahead.

mod first_use;
mod loss;

use anyhow::Result;
use brimful_cli::setting::{self, NumberType, words};
use clap::Args;
use serde_json::json;
use tch::Device;

use crate::journal::{Journal, Output};
use crate::timed;
use crate::turns::TurnProgress;
use loss::LossWork;

/// Options of `brimful-bench kernels`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  brimful-bench kernels --device cuda:0
  brimful-bench kernels --device cuda:0 --places 16384 --words 128256 --width 4096
  brimful-bench kernels --device cpu --dtype f64 --repeats 3

Compiled kernels are kept in $XDG_CACHE_HOME/brimful/kernels, without that in ~/.cache/brimful/kernels.
To measure their first use with an empty and a full cache, run it twice:
  export XDG_CACHE_HOME=$(mktemp -d)
  brimful-bench kernels --device cuda:0
  brimful-bench kernels --device cuda:0")]
pub(crate) struct KernelsOptions {
    #[arg(long, value_name = "NAME", help = words::ANY_DEVICE)]
    device: Option<String>,
    /// Number of predicted tokens [default: 8192 on CUDA, 256 on the CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(1..))]
    places: Option<i64>,
    /// Vocabulary size [default: 50304 on CUDA, 1000 on the CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(1..))]
    words: Option<i64>,
    /// Width of the embedding [default: 2048 on CUDA, 64 on the CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(1..))]
    width: Option<i64>,
    #[arg(long, value_enum, default_value = "bf16", help = words::DTYPE)]
    dtype: NumberType,
    /// Measured steps of each contestant
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = words::count)]
    repeats: usize,
    #[command(flatten)]
    output: Output,
}

/// Measures and prints.
pub(crate) fn run(options: &KernelsOptions) -> Result<()> {
    let device = setting::device(options.device.as_deref())?;
    options.dtype.prepare(device)?;
    let cuda = timed::try_kernels(device);
    let facts = json!({ "optimizer": "none", "cudnn_benchmark": cuda });
    let mut journal = Journal::begin("kernels", device, &options.output, facts)?;
    let progress = TurnProgress::new(first_use::STEPS + timed::turns(options.repeats));
    journal.enter(&first_use::measure(options.dtype, device, &progress)?)?;
    for row in loss::measure(options.loss_work(device), device, options.repeats, &progress)? {
        journal.enter(&row)?;
    }
    journal.end()
}

impl KernelsOptions {
    fn loss_work(&self, device: Device) -> LossWork {
        let (places, words, width) = match device {
            Device::Cpu => (256, 1000, 64),
            _ => (8192, 50_304, 2048),
        };
        LossWork {
            dtype: self.dtype,
            places: self.places.unwrap_or(places),
            words: self.words.unwrap_or(words),
            width: self.width.unwrap_or(width),
        }
    }
}
