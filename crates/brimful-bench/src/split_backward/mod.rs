//! `brimful-bench split-backward`: a split backward against the whole backward of the same graph.
//!
//! The graph is that of a stage in the middle of a pipeline: all layers but the first, whose output is the input
//! and requires a gradient. The two backwards alternate, each after its own forward, and begin with the same
//! output gradient. Their gradients must agree.

mod contest;
mod stage;

use anyhow::Result;
use brimful_cli::setting::{self, MODELS, ModelName, NumberType, words};
use brimful_torch::threads;
use clap::Args;
use serde_json::json;
use tch::Device;

use crate::journal::{Journal, Output};
use crate::timed::{try_kernels, turns};
use crate::turns::TurnProgress;
use crate::work::{GptShape, Workload};

/// Shape of the GPT on a CPU.
const GPT: GptShape = GptShape { layers: 4, width: 256, sequence: 64, llama: false };

/// Options of `brimful-bench split-backward`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  brimful-bench split-backward                                a GPT and a ResNet-50, on one thread of a CPU
  brimful-bench split-backward --device cuda --model gpt --dtype bf16 --micro-batch-size 8
  brimful-bench split-backward --model gpt --gpt 2x64x16 --repeats 100")]
pub(crate) struct SplitBackwardOptions {
    #[arg(long, value_delimiter = ',', default_value = "gpt,resnet50", value_name = "NAME,…")]
    #[arg(help = MODELS)]
    model: Vec<ModelName>,
    #[arg(long, value_name = "NAME", help = words::ANY_DEVICE)]
    device: Option<String>,
    /// Precision of parameters and activations [default: tf32 on CUDA, f32 on the CPU]
    #[arg(long, value_enum)]
    dtype: Option<NumberType>,
    /// Samples per micro-batch [default: by model and device]
    #[arg(long = "micro-batch-size", value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    micro_batch: Option<u32>,
    /// Image size in pixels [default: 224 on CUDA, 64 on the CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    image: Option<u32>,
    /// GPT shape as layers x width x sequence [default: 12x768x512 on CUDA, 4x256x64 on
    /// the CPU]. Heads are 64 wide, and the vocabulary has 256 tokens.
    #[arg(long, value_name = "LxWxS")]
    gpt: Option<GptShape>,
    /// Measured steps of each contestant
    #[arg(long, value_name = "N", default_value_t = 25, value_parser = words::count)]
    repeats: usize,
    #[command(flatten)]
    output: Output,
}

/// Measures a row for each model, and prints it.
pub(crate) fn run(options: &SplitBackwardOptions) -> Result<()> {
    let device = setting::device(options.device.as_deref())?;
    // One thread, like a stage's in a pipeline.
    let _one = threads::limit_threads(1);
    let cuda = try_kernels(device);
    let facts = json!({ "optimizer": "none", "cudnn_benchmark": cuda });
    let mut journal = Journal::begin("split_backward", device, &options.output, facts)?;
    let progress = TurnProgress::new(options.model.len() * turns(options.repeats));
    for &model in &options.model {
        let work = options.work(model, device);
        work.dtype.prepare(device)?;
        journal.enter(&contest::measure(&work, device, options.repeats, &progress)?)?;
    }
    journal.end()
}

impl SplitBackwardOptions {
    fn work(&self, model: ModelName, device: Device) -> Workload {
        let usual = Workload::of_bytes(model, device);
        let gpt = if device == Device::Cpu { GPT } else { usual.gpt };
        let micro_batch = self.micro_batch.map_or(usual.micro_batch, |samples| samples as usize);
        Workload {
            dtype: self.dtype.unwrap_or(usual.dtype),
            batch: micro_batch,
            micro_batch,
            image: self.image.map_or(usual.image, i64::from),
            gpt: self.gpt.unwrap_or(gpt),
            ..usual
        }
    }
}
