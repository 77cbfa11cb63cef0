//! `brimful-bench pipeline`: stages with a thread each, against the same model on one thread.
//!
//! For each number of stages the contestants alternate step by step: the model on one thread; one copy of it per
//! stage at once, which shows the machine's parallel capacity; and every schedule. A step is forward and backward
//! over the mini-batch and the reading of its loss, starting without gradients; the optimizer is left out, as in
//! bench/peers.

mod alone;
mod contest;
mod picture;
mod report;
mod runner;

use std::path::PathBuf;

use anyhow::Result;
use brimful::balance::{self, Profile};
use brimful::device;
use brimful::schedule::{Recompute, Schedule};
use brimful_cli::output;
use brimful_cli::setting::{self, MODELS, ModelName, words};
use brimful_torch::threads;
use clap::Args;
use serde_json::json;
use tch::Device;

use crate::journal::{Journal, Output};
use crate::turns::TurnProgress;
use crate::work::{GptShape, Workload};
use contest::PipelineContest;

/// Options of `brimful-bench pipeline`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  brimful-bench pipeline --table                     the transformer and the ResNet-101 of the comparison
  brimful-bench pipeline --stages 4 --svg steps.svg  what was simulated and what was measured, drawn
  brimful-bench pipeline --stages 4 -m 4,8,16,32     how the bubble shrinks with more micro-batches
  brimful-bench pipeline --model resnet101 --stages 2,4 --schedule gpipe --recompute never,always")]
pub(crate) struct PipelineOptions {
    #[arg(long, value_delimiter = ',', default_value = "gpt", value_name = "NAME,…")]
    #[arg(help = MODELS)]
    model: Vec<ModelName>,
    #[arg(long, short = 's', value_delimiter = ',', default_value = "1,2,4,8", value_name = "S,…")]
    #[arg(value_parser = words::count, help = words::STAGES)]
    stages: Vec<usize>,
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', help = words::SCHEDULE, long_help = words::SCHEDULES)]
    #[arg(
        default_value = "gpipe,1f1b,interleaved-2,interleaved-4,zero-bubble-h1,interleaved-zero-bubble-2,zero-bubble-v,auto,auto-interleaved-2,auto-v"
    )]
    #[arg(value_parser = setting::schedule)]
    schedule: Vec<Schedule>,
    #[arg(long, value_name = "WHEN,…", value_delimiter = ',', help = words::RECOMPUTE)]
    #[arg(default_value = "never", value_parser = setting::recompute)]
    recompute: Vec<Recompute>,
    #[arg(
        long = "num-micro-batches",
        short = 'm',
        value_delimiter = ',',
        default_value = "16",
        value_name = "M,…"
    )]
    #[arg(value_parser = words::count, help = words::MICRO_BATCHES)]
    micro_batches: Vec<usize>,
    /// Samples per micro-batch [default: 1 of a gpt or unet, 2 of a ResNet, 32 of an mlp]
    #[arg(long = "micro-batch-size", value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    micro_batch: Option<u32>,
    #[arg(long, value_name = "NAME", default_value = "cpu", help = words::DEVICE)]
    device: String,
    /// Image size in pixels
    #[arg(long, value_name = "N", default_value_t = 64)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    image: u32,
    /// GPT shape as layers x width x sequence: heads are 64 wide, and the vocabulary has 256 tokens
    // These 32 equal blocks spread evenly over 2, 4 and 8 devices, with up to 4 stages on each.
    #[arg(long, value_name = "LxWxS", default_value = "32x256x64")]
    gpt: GptShape,
    /// Measured steps of each contestant
    #[arg(long, value_name = "N", default_value_t = 3)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// Measure all rows of the project's comparison
    #[arg(long, conflicts_with = "model")]
    table: bool,
    /// Draw the schedules to this file: the last model's, simulated and measured
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[command(flatten)]
    output: Output,
}

/// Measures row after row, and prints each as it comes.
pub(crate) fn run(options: &PipelineOptions) -> Result<()> {
    let device = device::find(&options.device)?;
    // The pipeline limits its own threads; this is for the model alone.
    let _one = threads::limit_threads(1);
    let facts = json!({
        "threads_per_stage": 1,
        "optimizer": "none",
        "batch_norm": "deferred",
    });
    let mut journal = Journal::begin("pipeline", device, &options.output, facts)?;
    let (models, repeats) = (options.models(), options.repeats as usize);
    let contests = models.len() * options.micro_batches.len() * options.stages.len();
    let progress = TurnProgress::new(contests * (contest::WARM_UP + repeats));
    let mut picture = None;
    for &model in models {
        let works = options.micro_batches.iter().map(|&m| options.work(model, m, device));
        let works: Vec<Workload> = works.collect();
        let profile = measured(&works[0], device, &progress)?;
        for (work, &stages) in
            works.iter().flat_map(|work| options.stages.iter().map(move |s| (work, s)))
        {
            let devices = device::spread(&options.device, 0..stages)?;
            let mut contest = PipelineContest::new(options, work, &profile, &devices)?;
            contest.run(repeats, &progress, &mut journal)?;
            picture = options.svg.as_ref().map(|_| picture::draw(&contest.runners));
        }
    }
    if let (Some(path), Some(picture)) = (&options.svg, picture) {
        output::file(path, &picture)?;
    }
    journal.end()
}

/// Measures the time and memory of each layer with one micro-batch. The result is used for any number of
/// micro-batches.
fn measured(work: &Workload, device: Device, progress: &TurnProgress) -> Result<Profile> {
    work.dtype.prepare(device)?;
    let sample = work.samples(work.micro_batch).0;
    progress.row(&format!("{}: the layers", work.title()));
    let profile = balance::measure(&work.layers()?, device, &sample)?;
    progress.done();
    Ok(profile)
}

impl PipelineOptions {
    fn models(&self) -> &[ModelName] {
        if self.table { &[ModelName::Gpt, ModelName::Resnet101] } else { &self.model }
    }

    fn work(&self, model: ModelName, micro_batches: usize, device: Device) -> Workload {
        let usual = match model {
            ModelName::Mlp => 32,
            ModelName::Gpt | ModelName::UNet { .. } => 1,
            _ => 2,
        };
        let micro_batch = self.micro_batch.map_or(usual, |samples| samples as usize);
        Workload {
            batch: micro_batch * micro_batches,
            micro_batch,
            image: i64::from(self.image),
            gpt: self.gpt,
            ..Workload::of_bytes(model, device)
        }
    }
}
