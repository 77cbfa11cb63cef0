//! `brimful-bench micro`: micro-batched training against a hand-written loop, and its memory.
//!
//! A row is a model with a dtype, a mini-batch and a micro-batch. Its contestants alternate step by step, so that
//! changes in the machine's speed affect all of them. A step is forward and backward over the mini-batch and the
//! reading of its loss, starting without gradients; the optimizer is left out, as in bench/peers.

mod contest;
mod memory;
mod report;

use anyhow::Result;
use brimful_cli::setting::{self, MODELS, ModelName, NumberType, words};
use clap::Args;
use serde_json::json;
use tch::Device;

use crate::journal::{Journal, Output};
use crate::timed;
use crate::turns::TurnProgress;
use crate::work::{self, GptShape, Workload};

/// Options of `brimful-bench micro`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  brimful-bench micro --table --device cuda           the rows of the project's comparison
  brimful-bench micro --model gpt --gpt 2x128x64 --batch-size 16 --micro-batch-size 4
  brimful-bench micro --memory --micro-batch-size 2        memory by the number of micro-batches
  brimful-bench micro --memory --model mlp --micro-batch-size 64 --training-set 60000
                                                      up to all of it as one mini-batch")]
pub(crate) struct MicroOptions {
    #[arg(long, default_value = "resnet50", value_name = "NAME", help = MODELS)]
    model: ModelName,
    #[arg(long, value_name = "NAME", help = words::ANY_DEVICE)]
    device: Option<String>,
    /// Precision of parameters and activations [default: tf32 on CUDA, f32 on the CPU]
    #[arg(long, value_enum)]
    dtype: Option<NumberType>,
    /// Samples per mini-batch [default: by model and device]
    #[arg(long, value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    batch_size: Option<u32>,
    /// Samples per micro-batch [default: by model and device]
    #[arg(long = "micro-batch-size", value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    micro_batch: Option<u32>,
    /// Image size in pixels [default: 224 on CUDA, 64 on the CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    image: Option<u32>,
    /// GPT shape as layers x width x sequence [default: 12x768x512 on CUDA, 2x128x64 on
    /// the CPU]. Heads are 64 wide, and the vocabulary has 50,304 tokens.
    #[arg(long, value_name = "LxWxS")]
    gpt: Option<GptShape>,
    /// Llama of this shape, layers x width x sequence, in place of the GPT
    #[arg(long, value_name = "LxWxS", conflicts_with_all = ["model", "gpt", "table"])]
    llama: Option<GptShape>,
    /// Measured steps of each contestant
    #[arg(long, value_name = "N", default_value_t = 5)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// Measure all rows of the project's comparison: smaller ones on the CPU
    #[arg(long, conflicts_with_all = ["model", "dtype", "batch_size", "micro_batch"])]
    table: bool,
    /// Measure the peak memory of mini-batches of 1, 2, 4, … 128 micro-batches
    #[arg(long, conflicts_with_all = ["batch_size", "repeats"])]
    memory: bool,
    /// Samples in a training set, which is measured as a mini-batch too
    #[arg(long, value_name = "N", requires = "memory")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    training_set: Option<u32>,
    #[command(flatten)]
    output: Output,
}

/// Measures row after row, and prints each as it comes.
pub(crate) fn run(options: &MicroOptions) -> Result<()> {
    let device = setting::device(options.device.as_deref())?;
    let rows = options.rows(device);
    let cuda = timed::try_kernels(device);
    let facts = json!({
        "cudnn_benchmark": cuda,
        "optimizer": "none",
        "batch_norm": "deferred; the loop's per micro-batch",
        "host_batch": if cuda { "pinned" } else { "pageable" },
    });
    let mut journal = Journal::begin("micro", device, &options.output, facts)?;
    let repeats = options.repeats as usize;
    let training_set = options.training_set.map(|samples| samples as usize);
    let pieces = |work: &Workload| match options.memory {
        true => memory::pieces(work, training_set),
        false => timed::turns(repeats),
    };
    let progress = TurnProgress::new(rows.iter().map(pieces).sum());
    for work in &rows {
        work.dtype.prepare(device)?;
        if options.memory {
            memory::measure(work, training_set, device, &progress, &mut journal)?;
        } else {
            contest::measure(work, device, repeats, &progress, &mut journal)?;
        }
    }
    journal.end()
}

impl MicroOptions {
    fn rows(&self, device: Device) -> Vec<Workload> {
        let model = if self.llama.is_some() { ModelName::Gpt } else { self.model };
        let usual = match self.table {
            true => work::table(device),
            false => vec![Workload::default_of(model, device)],
        };
        usual.into_iter().map(|work| self.asked(work)).collect()
    }

    /// Overrides the default work by the given options; with --table only shapes can be given.
    fn asked(&self, work: Workload) -> Workload {
        let llama = self.llama.map(|shape| GptShape { llama: true, ..shape });
        Workload {
            dtype: self.dtype.unwrap_or(work.dtype),
            batch: self.batch_size.map_or(work.batch, |batch| batch as usize),
            micro_batch: self.micro_batch.map_or(work.micro_batch, |micro| micro as usize),
            image: self.image.map_or(work.image, i64::from),
            gpt: llama.or(self.gpt).unwrap_or(work.gpt),
            ..work
        }
    }
}
