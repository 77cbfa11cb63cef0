//! `brimful-bench ranks`: data parallelism over processes with one thread each, started by `mpirun`.
//!
//! The contestants alternate step by step: the first rank alone with the whole mini-batch, then all ranks with a
//! part each. A step is forward and backward over the mini-batch, the gradients on every rank, and the reading of
//! the loss; the optimizer is left out, as in bench/peers.

use std::time::Instant;

use anyhow::{Result, ensure};
use brimful::{Bytes, MicroBatcher, MicroBatches, World};
use brimful_cli::setting::{self, LossModel, MODELS, ModelName, clear_gradients, words};
use brimful_torch::threads;
use clap::Args;
use serde::Serialize;
use serde_json::json;
use tch::nn::VarStore;
use tch::{Device, Tensor};

use crate::columns::{Columns, Speed};
use crate::journal::{Journal, Output};
use crate::times::StepTimes;
use crate::work::{GptShape, Samples, Workload};

/// Steps of each contestant that do not count.
const WARM_UP: u32 = 1;

/// Options of `brimful-bench ranks`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  mpirun -n 2 brimful-bench ranks                    two ranks, one thread each, a transformer
  mpirun -n 2 brimful-bench ranks --json > ours.jsonl
  python3 bench/peers/data_parallel_pytorch.py --like ours.jsonl")]
pub(crate) struct RanksOptions {
    #[arg(long, default_value = "gpt", value_name = "NAME", help = MODELS)]
    model: ModelName,
    #[arg(long, value_name = "N", default_value_t = 16, help = words::BATCH_SIZE)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    batch_size: u32,
    #[arg(long = "micro-batch-size", value_name = "N", default_value_t = 2, help = words::MICRO_BATCH)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    micro_batch: u32,
    /// Image size in pixels
    #[arg(long, value_name = "N", default_value_t = 64)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    image: u32,
    /// GPT shape as layers x width x sequence: heads are 64 wide, and the vocabulary has 256 tokens
    #[arg(long, value_name = "LxWxS", default_value = "12x256x64")]
    gpt: GptShape,
    #[arg(long, value_name = "NAME", default_value = "cpu", help = words::DEVICE)]
    device: String,
    /// Measured steps of each contestant
    #[arg(long, value_name = "N", default_value_t = 5)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    #[command(flatten)]
    output: Output,
}

#[derive(Debug, Serialize)]
struct RanksRow {
    #[serde(flatten)]
    columns: Columns,
    #[serde(flatten)]
    speed: Speed,
    ranks: usize,
    /// Speed, divided by that of one rank in the same run.
    ratio: f64,
    /// Bytes that each rank sends in a step.
    sent_bytes: Bytes,
    peak_bytes: Option<Bytes>,
}

/// Model and its engine, with other ranks or without.
struct RanksContestant {
    name: &'static str,
    ranks: usize,
    store: VarStore,
    model: LossModel,
    micro: MicroBatcher,
    times: StepTimes,
    /// Bytes that each rank sent in the last step.
    sent: Bytes,
}

/// Measures one rank and all ranks alternately; the first rank prints.
pub(crate) fn run(options: &RanksOptions) -> Result<()> {
    let (world, work) = (World::start()?, options.work());
    ensure!(
        work.batch.is_multiple_of(world.size()),
        "--batch-size {} is no multiple of the {} ranks: give one that is",
        work.batch,
        world.size()
    );
    let _one = threads::limit_threads(1);
    let device = setting::device_of(&options.device, &world)?;
    let mut one = RanksContestant::new(&work, device, None)?;
    let mut all = RanksContestant::new(&work, device, Some(&world))?;
    let whole = work.samples(work.batch);
    world.broadcast(&[whole.0.shallow_clone(), whole.1.shallow_clone()], 0)?;
    let part = part_of(&whole, &world);
    for turn in 0..WARM_UP + options.repeats {
        let counts = turn >= WARM_UP;
        if world.rank() == 0 {
            one.step(&whole, counts, || Ok(()))?;
        }
        let before = world.traffic()?.sent.0;
        all.step(&part, counts, || {
            world.share("a step's beginning or end", &())?;
            Ok(())
        })?;
        all.sent = Bytes(world.traffic()?.sent.0 - before);
    }
    if world.rank() > 0 {
        return Ok(());
    }
    let facts = json!({ "threads_per_rank": 1, "optimizer": "none" });
    let mut journal = Journal::begin("ranks", device, &options.output, facts)?;
    for contestant in [&one, &all] {
        journal.enter(&contestant.row(&work, &one.times))?;
    }
    journal.end()
}

impl RanksContestant {
    fn new(work: &Workload, device: Device, world: Option<&World>) -> Result<Self> {
        let store = VarStore::new(device);
        let model = work.build(&store)?;
        let micro = MicroBatcher::new(&store, MicroBatches::Samples(work.micro_batch));
        let (name, ranks, micro) = match world {
            Some(world) => ("brimful", world.size(), micro.join(world)?),
            None => ("brimful, one rank", 1, micro),
        };
        Ok(Self { name, ranks, store, model, micro, times: StepTimes::default(), sent: Bytes(0) })
    }

    /// Runs one step, from all ranks ready to all ranks done.
    fn step(&mut self, batch: &Samples, counts: bool, wait: impl Fn() -> Result<()>) -> Result<()> {
        clear_gradients(&self.store)?;
        wait()?;
        let (start, model) = (Instant::now(), &self.model);
        self.micro.backward(batch, |(x, y)| model.loss(&x, &y, true))?;
        wait()?;
        self.times.push_if(counts, start.elapsed().as_secs_f64());
        Ok(())
    }

    fn row(&self, work: &Workload, one: &StepTimes) -> RanksRow {
        RanksRow {
            columns: Columns::new(self.name, work),
            speed: Speed::new(work, &self.times),
            ranks: self.ranks,
            ratio: one.median() / self.times.median(),
            sent_bytes: self.sent,
            peak_bytes: None,
        }
    }
}

/// Returns this rank's samples.
fn part_of((x, y): &Samples, world: &World) -> Samples {
    let each = x.size()[0] / world.size() as i64;
    let part = |whole: &Tensor| whole.narrow(0, each * world.rank() as i64, each);
    (part(x), part(y))
}

impl RanksOptions {
    fn work(&self) -> Workload {
        Workload {
            batch: self.batch_size as usize,
            micro_batch: self.micro_batch as usize,
            image: i64::from(self.image),
            gpt: self.gpt,
            // In f32, whatever the device.
            ..Workload::of_bytes(self.model, Device::Cpu)
        }
    }
}
