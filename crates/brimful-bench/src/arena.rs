//! `brimful-bench arena`: the cost of memory accounting, on a ResNet-50 training step.
//!
//! Steps with and without an arena alternate, so that changes in the machine's speed affect both. Without an
//! arena libtorch's own allocator is installed.

use std::time::Instant;

use anyhow::Result;
use brimful::Bytes;
use brimful::memory::Arena;
use brimful_cli::setting::words;
use clap::Args;
use serde::Serialize;
use serde_json::json;
use tch::nn::{self, ModuleT, OptimizerConfig};
use tch::{Device, Kind, Tensor, vision};

use crate::journal::{Journal, Output};
use crate::times::StepTimes;
use crate::turns::TurnProgress;

/// Options of `brimful-bench arena`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  brimful-bench arena
  brimful-bench arena --batch-size 32 --image 224 --repeats 5")]
pub(crate) struct ArenaOptions {
    #[arg(long, value_name = "N", default_value_t = 8, help = words::BATCH_SIZE)]
    #[arg(value_parser = clap::value_parser!(i64).range(1..))]
    batch_size: i64,
    /// Image size in pixels
    #[arg(long, value_name = "N", default_value_t = 96)]
    #[arg(value_parser = clap::value_parser!(i64).range(1..))]
    image: i64,
    /// Measured steps of each contestant
    #[arg(long, value_name = "N", default_value_t = 15, value_parser = words::count)]
    repeats: usize,
    #[command(flatten)]
    output: Output,
}

/// Measures and prints.
pub(crate) fn run(options: &ArenaOptions) -> Result<()> {
    let facts = json!({ "optimizer": "sgd", "batch_norm": "tch's" });
    let mut journal = Journal::begin("arena", Device::Cpu, &options.output, facts)?;
    journal.enter(&measured(options)?)?;
    journal.end()
}

fn measured(options: &ArenaOptions) -> Result<ArenaRow> {
    let ArenaOptions { batch_size: batch, image, repeats, .. } = *options;
    let store = nn::VarStore::new(Device::Cpu);
    let model = vision::resnet::resnet50(&store.root(), 1000);
    let mut optimizer = nn::Sgd::default().build(&store, 1e-3)?;
    let images = Tensor::randn([batch, 3, image, image], (Kind::Float, Device::Cpu));
    let labels = Tensor::randint(1000, [batch], (Kind::Int64, Device::Cpu));
    let mut step = || {
        let start = Instant::now();
        let loss = model.forward_t(&images, true).cross_entropy_for_logits(&labels);
        optimizer.backward_step(&loss);
        start.elapsed().as_secs_f64()
    };
    let progress = TurnProgress::new(repeats);
    progress.row("resnet50");
    step();
    let (mut with, mut without) = (StepTimes::default(), StepTimes::default());
    let (mut peak_bytes, mut allocations) = (0, 0);
    for turn in 0..repeats {
        progress.turn("resnet50", "without and with an arena", turn, 0, repeats);
        without.push(step());
        let arena = Arena::new("bench");
        let inside = arena.enter();
        with.push(step());
        drop(inside);
        (peak_bytes, allocations) = (arena.peak(), arena.allocations());
        progress.advance(1);
    }
    progress.done();
    Ok(ArenaRow {
        model: "resnet50",
        shape: format!("{image}×{image}"),
        dtype: "f32",
        batch,
        repeats,
        threads: brimful::libtorch::threads(),
        seconds_without: without.median(),
        seconds_with: with.median(),
        ratio: without.median() / with.median(),
        samples_per_s: batch as f64 / with.median(),
        peak_bytes: Bytes(peak_bytes),
        allocations,
    })
}

#[derive(Debug, Serialize)]
struct ArenaRow {
    model: &'static str,
    shape: String,
    dtype: &'static str,
    batch: i64,
    repeats: usize,
    threads: usize,
    seconds_without: f64,
    seconds_with: f64,
    /// Time without accounting, divided by the time with it; 1 means that accounting is free.
    ratio: f64,
    samples_per_s: f64,
    peak_bytes: Bytes,
    allocations: u64,
}
