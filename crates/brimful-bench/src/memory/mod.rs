//! `brimful-bench memory`: the largest U-Net and AmoebaNet-D that fit k devices of one size.
//!
//! Measures a few layers, lets the planner find the largest model whose step fits, and confirms it with two steps
//! and their optimizer in arenas (or on GPUs) of that size. If the steps run out of memory, it takes the next
//! smaller model. `naive-1` is one stage that keeps the activations of the whole mini-batch; `pipeline-k` has k
//! stages and a micro-batch for each sample; `offload-1` offloads stages of one device to the host as far as they
//! do not fit.

mod family;
mod report;
mod search;
mod trial;

use std::collections::VecDeque;
use std::fmt;

use anyhow::{Result, ensure};
use brimful::{Bytes, device};
use brimful_cli::exit::does_not_fit;
use brimful_cli::setting::{ModelName, words};
use clap::Args;
use serde_json::json;
use tch::Device;

use crate::journal::{Journal, Output};
use crate::turns::TurnProgress;
use crate::work::Workload;
use family::Family;
use report::{LargestRow, none_fits};
use search::{FoundModel, LargestSearch};
use trial::{MemoryCapacity, StepMemory};

/// Options of `brimful-bench memory`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  brimful-bench memory                               arenas of 80 MiB on the CPU
  brimful-bench memory --memory-limit 256MiB --family unet --channels 16 --stages 1,2
  brimful-bench memory --host-memory 0B              without offloading
  brimful-bench memory --device cuda --image 192     on as many GPUs as there are, with all their memory")]
pub(crate) struct MemoryOptions {
    /// Model families to search
    #[arg(long, value_enum, value_delimiter = ',', default_value = "unet,amoebanet")]
    family: Vec<Family>,
    /// Memory limit of each device, such as 96MiB or 16GB [default: 80MiB on the CPU, on CUDA all free memory]
    #[arg(long, value_name = "BYTES")]
    memory_limit: Option<Bytes>,
    /// Host memory for offloaded stages [default: 8 devices' memory on the CPU, on CUDA all free memory]
    #[arg(long, value_name = "BYTES")]
    host_memory: Option<Bytes>,
    #[arg(long, short = 's', value_delimiter = ',', default_value = "1,2,4,8", value_name = "S,…")]
    #[arg(value_parser = words::count, help = words::STAGES)]
    stages: Vec<usize>,
    #[arg(long, value_name = "N", default_value_t = 16, help = words::BATCH_SIZE)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    batch_size: u32,
    /// Image size in pixels: for a U-Net a multiple of 32, at least 64
    #[arg(long, value_name = "N", default_value_t = 64)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    image: u32,
    /// Channels of the U-Net [default: 8 on the CPU, 128 on CUDA]
    #[arg(long, value_name = "C")]
    channels: Option<u16>,
    /// Filters of the AmoebaNet-D [default: 48 on the CPU, 512 on CUDA]
    #[arg(long, value_name = "F")]
    filters: Option<u16>,
    #[arg(long, value_name = "NAME", default_value = "cpu", help = words::DEVICE)]
    device: String,
    #[command(flatten)]
    output: Output,
}

/// Run configuration of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Experiment {
    devices: usize,
    way: Way,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// One stage that keeps all activations.
    Naive,
    /// One stage per device.
    Pipeline,
    /// Stages offloaded to the host as far as they do not fit.
    Offload,
}

impl fmt::Display for Experiment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let way = match self.way {
            Way::Naive => "naive",
            Way::Pipeline => "pipeline",
            Way::Offload => "offload",
        };
        write!(f, "{way}-{}", self.devices)
    }
}

/// Finds and confirms model after model, and prints each as it comes.
pub(crate) fn run(options: &MemoryOptions) -> Result<()> {
    let device = device::find(&options.device)?;
    let capacity = MemoryCapacity::new(options, device)?;
    let facts = json!({
        "memory": capacity.limit,
        "host_memory": capacity.host,
        "optimizer": "sgd for a unet, with momentum for an amoebanet",
        "batch_norm": "deferred",
    });
    let mut journal = Journal::begin("memory", device, &options.output, facts)?;
    let progress = TurnProgress::new(options.family.len());
    let mut fitted = false;
    for &family in &options.family {
        progress.row(&format!("{family}: the layers"));
        let search = LargestSearch::measure(family, options.work(family, device), capacity)?;
        progress.done();
        fitted |= options.table(&search, &progress, &mut journal)?;
        progress.advance(1);
    }
    ensure!(
        fitted,
        does_not_fit(format!("no model of any size fits {}: raise --memory-limit", capacity.limit))
    );
    journal.end()
}

impl MemoryOptions {
    /// Enters the rows of one family; returns whether a model fits.
    fn table(
        &self,
        search: &LargestSearch,
        progress: &TurnProgress,
        journal: &mut Journal,
    ) -> Result<bool> {
        let plan =
            |experiment| Ok((experiment, search.largest(experiment, search.capacity.limit)?));
        let mut planned =
            self.experiments(search.capacity.host).map(plan).collect::<Result<VecDeque<_>>>()?;
        let mut first = None;
        while let Some((experiment, found)) = planned.pop_front() {
            let title = format!("{} {experiment}", search.family);
            progress.row(&title);
            let later = planned.iter().filter_map(|(_, found)| found.as_ref());
            let later: f64 = later.map(|found| search.capacity.seconds(found)).sum();
            let watch = |found: &FoundModel| {
                let left = search.capacity.seconds(found) + later;
                progress.step(&title, &found.work.model.to_string(), left);
            };
            let found = confirmed(search, experiment, found, watch)?;
            progress.done();
            let Some((found, outcome)) = found else {
                journal.enter(&none_fits(search, experiment))?;
                continue;
            };
            let parameters = found.work.layers()?.parameter_count()?;
            let ratio = parameters as f64 / *first.get_or_insert(parameters) as f64;
            let row = LargestRow::new(search, experiment, &found, outcome, (parameters, ratio))?;
            journal.enter(&row)?;
        }
        Ok(first.is_some())
    }

    fn experiments(&self, host: Bytes) -> impl Iterator<Item = Experiment> {
        let pipelines = self.stages.iter().map(|&devices| (devices, Way::Pipeline));
        let offload = (host > Bytes(0)).then_some((1, Way::Offload));
        let all = [(1, Way::Naive)].into_iter().chain(pipelines).chain(offload);
        all.map(|(devices, way)| Experiment { devices, way })
    }

    /// Returns the smallest model of the family, with the samples that all its models get.
    fn work(&self, family: Family, device: Device) -> Workload {
        let small = device == Device::Cpu;
        let width = match family {
            Family::Unet => self.channels.unwrap_or(if small { 8 } else { 128 }),
            Family::Amoebanet => self.filters.unwrap_or(if small { 48 } else { 512 }),
        };
        let model: ModelName = family.model(1, i64::from(width));
        let (batch, image) = (self.batch_size as usize, i64::from(self.image));
        Workload { model, batch, micro_batch: 1, image, ..Workload::default_of(model, device) }
    }
}

/// Returns the largest model whose steps run, from the planned one downwards.
fn confirmed(
    search: &LargestSearch,
    experiment: Experiment,
    mut found: Option<FoundModel>,
    watch: impl Fn(&FoundModel),
) -> Result<Option<(FoundModel, StepMemory)>> {
    while let Some(model) = found {
        watch(&model);
        if let Some(outcome) = search.capacity.run(&model, search.family)? {
            return Ok(Some((model, outcome)));
        }
        // The plan does not count an operation's workspace: if that exceeds the limit, the next plan leaves a
        // fiftieth more free.
        found = search.largest(experiment, Bytes(model.row.largest_peak() / 50 * 49))?;
    }
    Ok(None)
}
