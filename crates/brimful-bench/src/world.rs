//! `brimful-bench world`: a pipeline over the ranks of `mpirun` against the same pipeline in one process.
//!
//! The two pipelines alternate step by step, with the same balance and one thread per stage. A step is forward and
//! backward over the mini-batch and the reading of its loss; the optimizer is left out.

use anyhow::{Result, ensure};
use brimful::pipeline::BalanceBy;
use brimful::schedule::{Recompute, Schedule};
use brimful::{Bytes, DeviceSpec, MicroBatches, Pipeline, World, device};
use brimful_cli::commands::train::RankOptions;
use brimful_cli::setting::{self, ModelName, words};
use brimful_torch::threads;
use clap::Args;
use serde::Serialize;
use serde_json::json;
use tch::Device;

use crate::columns::{Columns, Speed, Staging};
use crate::journal::{Journal, Output};
use crate::timed::pipeline_step;
use crate::times::StepTimes;
use crate::work::{GptShape, Workload};

/// Steps of each contestant before the first one that counts.
const WARM_UP: usize = 1;

/// Options of `brimful-bench world`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  mpirun -n 2 --bind-to none brimful-bench world     two ranks, one thread each, a transformer")]
pub(crate) struct WorldOptions {
    #[arg(long, value_name = "NAME", default_value_t = Schedule::OneFOneB)]
    #[arg(help = words::SCHEDULE, long_help = words::SCHEDULES, value_parser = setting::schedule)]
    schedule: Schedule,
    #[arg(long = "num-micro-batches", short = 'm', value_name = "M", default_value_t = 16)]
    #[arg(help = words::MICRO_BATCHES)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    micro_batches: u32,
    /// GPT shape as layers x width x sequence: heads are 64 wide, and the vocabulary has 256 tokens
    #[arg(long, value_name = "LxWxS", default_value = "32x256x64")]
    gpt: GptShape,
    #[arg(long, value_name = "NAME", default_value = "cpu", help = words::DEVICE)]
    device: String,
    /// Measured steps of each contestant
    #[arg(long, value_name = "N", default_value_t = 5)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    #[command(flatten)]
    ranks: RankOptions,
    #[command(flatten)]
    output: Output,
}

#[derive(Serialize)]
struct WorldRow {
    #[serde(flatten)]
    columns: Columns,
    #[serde(flatten)]
    speed: Speed,
    micro_batches: usize,
    #[serde(flatten)]
    staging: Staging,
    balance: Vec<usize>,
    /// Speed, divided by that in one process.
    ratio: f64,
    /// Bytes of a step's activations and gradients at the cuts, and bytes that all ranks sent in a step.
    least_bytes: Option<Bytes>,
    sent_bytes: Option<Bytes>,
}

/// Measures, and prints on rank 0.
pub(crate) fn run(options: &WorldOptions) -> Result<()> {
    let world = options.ranks.world()?;
    let _one = threads::limit_threads(1);
    let device = setting::device_of(&options.device, &world)?;
    let work = options.work();
    let over_ranks = pipeline(&work, options, &world, &[device], None)?;
    let balance = over_ranks.balance().sizes().to_vec();
    let devices = balance.len() / options.schedule.stages_per_device();
    let (alone, all) = (World::alone(), device::spread(&options.device, 0..devices)?);
    let in_one = || pipeline(&work, options, &alone, &all, Some(balance.clone()));
    let in_one = (world.rank() == 0).then(in_one).transpose()?;
    let ([near, far], sent) = options.measure(&work, &world, over_ranks, in_one)?;
    if world.rank() > 0 {
        return Ok(());
    }
    let facts = json!({ "threads_per_stage": 1, "optimizer": "none", "ranks": world.size() });
    let mut journal = Journal::begin("world", device, &options.output, facts)?;
    let numbers = work.gpt.sequence * work.gpt.width * work.batch as i64;
    let least = 2 * 4 * numbers as u64 * (balance.len() as u64 - 1);
    let row = |contestant, times: &StepTimes, [least, sent]: [Option<u64>; 2]| WorldRow {
        columns: Columns::new(contestant, &work),
        speed: Speed::new(&work, times),
        micro_batches: work.batch,
        staging: Staging::new(devices, options.schedule, Recompute::Never),
        balance: balance.clone(),
        ratio: near.median() / times.median(),
        least_bytes: least.map(Bytes),
        sent_bytes: sent.map(Bytes),
    };
    journal.enter(&row("brimful", &near, [None; 2]))?;
    journal.enter(&row("brimful over ranks", &far, [least, sent].map(Some)))?;
    journal.end()
}

impl WorldOptions {
    fn work(&self) -> Workload {
        Workload {
            batch: self.micro_batches as usize,
            micro_batch: 1,
            gpt: self.gpt,
            // In f32, whatever the device.
            ..Workload::of_bytes(ModelName::Gpt, Device::Cpu)
        }
    }

    /// Alternates steps of both pipelines; only rank 0 has the one in one process. Returns the times in one process
    /// and over ranks, and the bytes that all ranks sent in a step.
    fn measure(
        &self,
        work: &Workload,
        world: &World,
        mut over_ranks: Pipeline,
        mut in_one: Option<Pipeline>,
    ) -> Result<([StepTimes; 2], u64)> {
        tch::manual_seed(0);
        let batch = work.samples(work.batch);
        let (mut near, mut far, mut sent) = (StepTimes::default(), StepTimes::default(), 0);
        for turn in 0..WARM_UP + self.repeats as usize {
            let counts = turn >= WARM_UP;
            if let Some(pipeline) = &mut in_one {
                near.push_if(counts, pipeline_step(pipeline, &batch)?.1);
            }
            // The other ranks wait here for rank 0.
            world.share("turn", &turn)?;
            let before = world.traffic()?.sent.0;
            let (step, seconds) = pipeline_step(&mut over_ranks, &batch)?;
            sent = world.share("sent", &(world.traffic()?.sent.0 - before))?.into_iter().sum();
            far.push_if(counts, seconds);
            ensure!(step.loss.is_finite(), "the loss is {}", step.loss);
        }
        Ok(([near, far], sent))
    }
}

/// Builds a pipeline with these devices in each rank of the world.
fn pipeline(
    work: &Workload,
    options: &WorldOptions,
    world: &World,
    devices: &[Device],
    balance: Option<Vec<usize>>,
) -> Result<Pipeline> {
    let balance = match balance {
        Some(sizes) => BalanceBy::from(sizes),
        None => BalanceBy::by_time(&work.samples(work.micro_batch).0),
    };
    tch::manual_seed(0);
    Ok(Pipeline::builder(work.layers()?)
        .devices(devices.iter().map(|device| DeviceSpec::from(*device).threads(1)))
        .balance(balance)
        .schedule(options.schedule)
        .micro_batches(MicroBatches::Count(options.micro_batches as usize))
        .world(world)
        .build()?)
}
