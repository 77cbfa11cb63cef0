//! Command line of `brimful plan`.

use std::path::PathBuf;
use std::str::FromStr;

use anyhow::Result;
use brimful::plan::PlanDevice;
use brimful::schedule::{Recompute, Schedule};
use brimful::{Bytes, device};
use clap::Args;

use crate::commands::train::{GradientDtype, OptimizerName, OptimizerState};
use crate::files::{self, FlagFile};
use crate::setting::{self, ANY_MODEL, ANY_MODELS, ModelSource, NumberType, capacity, words};

/// Options of `brimful plan`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct PlanOptions {
    #[arg(long, short = 's', value_name = "S", value_parser = words::count, help = words::STAGES)]
    #[arg(long_help = words::STAGES_LONG)]
    #[arg(required_unless_present = "schedule_file")]
    pub(super) stages: Option<usize>,

    /// Micro-batches per mini-batch [default: the best number for the model]
    #[arg(long, short = 'm', value_name = "M", value_parser = words::count)]
    #[arg(required_unless_present_any = ["model", "profile", "schedule_file"])]
    pub(super) num_micro_batches: Option<usize>,

    /// Pipeline schedule: all, or some of gpipe, 1f1b, interleaved, auto, …
    ///
    /// Also breadth-first, zero-bubble-h1, interleaved-zero-bubble, zero-bubble-v; and auto, auto-interleaved and auto-v,
    /// which are made from the stages' times
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', default_value = "all")]
    pub(super) schedule: Vec<ScheduleChoice>,

    /// Stages per device (V) of interleaved and breadth-first schedules
    #[arg(long, short = 'v', value_name = "V", default_value_t = 2, value_parser = words::count)]
    pub(super) virtual_stages: usize,

    /// Activation recomputation: never, except-last, always [default: never; for a model the best]
    #[arg(long, value_name = "WHEN", value_parser = setting::recompute)]
    pub(super) recompute: Option<Recompute>,

    #[arg(long, value_name = "BYTES", help = words::MEMORY_LIMIT)]
    pub(super) memory_limit: Option<Bytes>,

    /// Simulate the schedule in this file: one line per device, of cells such as 2F0
    #[arg(long, value_name = "CSV")]
    #[arg(conflicts_with_all = ["model", "profile", "schedule", "num_micro_batches", "stages", "recompute"])]
    pub(super) schedule_file: Option<PathBuf>,

    #[arg(long, help = words::JSON)]
    pub(super) json: bool,

    /// Draw the schedules to this file
    #[arg(long, value_name = "FILE")]
    pub(super) svg: Option<PathBuf>,

    /// Write a step's timeline for ui.perfetto.dev [the best schedule's]
    #[arg(long, value_name = "FILE")]
    pub(super) trace: Option<PathBuf>,

    /// Write an HTML page: the best step of each schedule
    #[arg(long, value_name = "FILE")]
    pub(super) report: Option<PathBuf>,

    #[command(flatten)]
    pub(super) numbers: PlainNumbers,

    #[command(flatten)]
    pub(super) measured: MeasuredModel,
}

/// Cost of a micro-batch on a device, in plain numbers.
#[derive(Debug, Args)]
#[command(next_help_heading = "Costs in plain numbers")]
pub(super) struct PlainNumbers {
    /// Time of a micro-batch's forward on one device, in any unit
    #[arg(long, value_parser = words::not_negative, value_name = "TIME", default_value_t = 1.0)]
    pub(super) forward: f64,

    /// Time of a micro-batch's backward on one device [default: the sum of dX and dW, or 2]
    #[arg(long, value_parser = words::not_negative, value_name = "TIME")]
    pub(super) backward: Option<f64>,

    /// Time of the input gradient (dX) [default: half the backward]
    #[arg(long, value_parser = words::not_negative, value_name = "TIME")]
    pub(super) input_gradient: Option<f64>,

    /// Time of the weight gradient (dW) [default: the rest of the backward]
    #[arg(long, value_parser = words::not_negative, value_name = "TIME")]
    pub(super) weight_gradient: Option<f64>,

    /// Activation bytes of a micro-batch on a device
    #[arg(long, value_name = "BYTES")]
    pub(super) activations: Option<Bytes>,

    /// Bytes of parameters, gradients and optimizer state on a device
    #[arg(long, value_name = "BYTES")]
    pub(super) parameters: Option<Bytes>,
}

/// Model with measured layers.
#[derive(Debug, Args)]
#[command(next_help_heading = "Measured model")]
pub(super) struct MeasuredModel {
    #[arg(long, value_name = "MODEL", requires = "batch_size", group = "layers")]
    #[arg(help = ANY_MODEL, long_help = ANY_MODELS)]
    #[arg(conflicts_with_all = ["forward", "backward", "input_gradient", "weight_gradient"])]
    #[arg(conflicts_with_all = ["activations", "parameters", "profile"])]
    pub(super) model: Option<ModelSource>,

    #[arg(long, value_name = "NAME", default_value = "cpu", help = words::DEVICE)]
    pub(super) device: String,

    /// Profile of the layers, as TOML or JSON
    #[arg(long, value_name = "FILE", requires = "batch_size", group = "layers")]
    #[arg(conflicts_with_all = ["forward", "backward", "input_gradient", "weight_gradient"])]
    #[arg(conflicts_with_all = ["activations", "parameters"])]
    pub(super) profile: Option<PathBuf>,

    #[arg(long, value_name = "N", value_parser = words::count)]
    #[arg(help = words::BATCH_SIZE)]
    pub(super) batch_size: Option<usize>,

    #[arg(long, value_enum, value_name = "TYPE", default_value = "f32", requires = "layers")]
    #[arg(help = format!("{} [with --profile: its own]", words::DTYPE))]
    #[arg(hide_possible_values = true)]
    pub(super) dtype: NumberType,

    /// Optimizer: sgd, adam, adamw, adafactor or muon [default: none]
    #[arg(long, value_enum, value_name = "NAME", requires = "layers")]
    #[arg(hide_possible_values = true)]
    pub(super) optimizer: Option<OptimizerName>,

    /// Dtype of the optimizer's averages (moments) [default: f32]
    #[arg(long, value_enum, value_name = "FORMAT", requires = "optimizer")]
    pub(super) optimizer_state: Option<OptimizerState>,

    /// Update offloaded weights during the backward, layer by layer
    #[arg(long, requires = "layers")]
    pub(super) update_in_backward: bool,

    /// Dtype of offloaded gradients: f32, or bf16 for half the memory and transfers
    #[arg(long, value_enum, value_name = "DTYPE", default_value = "f32")]
    #[arg(hide_possible_values = true, requires = "layers", conflicts_with = "update_in_backward")]
    pub(super) offload_gradients: GradientDtype,

    /// Bytes of optimizer state per byte of parameters: SGD 0, SGD with momentum 1, Adam 2
    #[arg(long, conflicts_with = "optimizer", value_parser = words::not_negative, value_name = "FACTOR", default_value_t = 0.0)]
    pub(super) optimizer_bytes: f64,

    /// Host memory for offloaded stages [default: all free memory; with --profile none]
    #[arg(long, value_name = "BYTES", requires = "batch_size")]
    pub(super) host_memory: Option<Bytes>,

    /// Bytes per second of the host link, to the device and back, such as 55GB,50GB [default: measured]
    #[arg(long, value_name = "BYTES[,BYTES]", value_delimiter = ',', requires = "batch_size")]
    pub(super) host_link: Vec<Bytes>,
}

const EXAMPLES: &str = "\
Examples:
  Compare all schedules on 8 devices:
      brimful plan --stages 8 --num-micro-batches 24 --forward 1 --backward 2

  Draw one schedule:
      brimful plan -s 4 -m 8 --schedule 1f1b --svg 1f1b.svg

  Find what fits into 16 GiB, with activations of 3 GiB per micro-batch:
      brimful plan -s 4 -m 16 --activations 3GiB --parameters 2GiB --memory-limit 16GiB

  Find the best plan for a model, with measured layers:
      brimful plan --model resnet18 --batch-size 64 --stages 2 --memory-limit 512MiB

  Find the best plan for a profile:
      brimful plan --profile model.toml --batch-size 256 --stages 4 --memory-limit 16GiB \
                   --optimizer-bytes 2

  Plan offloading from a GPU of 8 GB to a host of 64 GB:
      brimful plan --profile model.toml --batch-size 256 --stages 1 --memory-limit 8GB \
                   --optimizer-bytes 2 --host-memory 64GB --host-link 55GB

  Find the largest model that this GPU and its host can train, and the batch that hides transfers:
      brimful plan --model gpt2 --batch-size 32 --stages 1 --device cuda --dtype bf16 \
                   --optimizer adamw --optimizer-state 8bit --update-in-backward

  Simulate a custom schedule:
      brimful plan --schedule-file mine.csv --trace mine.json

A profile has a list of layers; times are in seconds per sample, sizes in bytes per sample:
      [[layers]]
      name = \"stem\"
      forward = 0.0011
      backward = 0.0023
      parameter_bytes = 37632
      activation_bytes = 3211264
      output_bytes = 802816";

impl PlanOptions {
    /// Lists the files that the command reads and writes.
    pub(crate) fn files(&self) -> Vec<FlagFile> {
        let files = [
            files::written("--svg", self.svg.as_ref()),
            files::written("--trace", self.trace.as_ref()),
            files::written("--report", self.report.as_ref()),
            files::read("--schedule-file", self.schedule_file.as_ref()),
            files::read("--profile", self.measured.profile.as_ref()),
        ];
        files.into_iter().flatten().collect()
    }

    /// Returns the description of one device. All devices are alike.
    pub(super) fn device(&self) -> PlanDevice {
        PlanDevice { memory: self.memory_limit.map(|memory| memory.0), ..PlanDevice::default() }
    }

    /// Returns the description of the device that the model is measured on. The memory of a GPU is a limit too.
    pub(super) fn measured_device(&self) -> Result<PlanDevice> {
        if self.measured.model.is_none() {
            return Ok(self.device());
        }
        let capacity = capacity(device::find(&self.measured.device)?, self.memory_limit)?;
        Ok(PlanDevice { memory: capacity.map(|memory| memory.0), ..PlanDevice::default() })
    }

    pub(super) fn schedules(&self) -> Vec<Schedule> {
        let v = self.virtual_stages;
        let chosen = |choice: &ScheduleChoice| match *choice {
            ScheduleChoice::All => Schedule::all(v).to_vec(),
            ScheduleChoice::Unnumbered(schedule) => vec![schedule.with_stages_per_device(v)],
            ScheduleChoice::One(schedule) => vec![schedule],
        };
        self.schedule.iter().flat_map(chosen).collect()
    }
}

/// A value of `--schedule`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ScheduleChoice {
    All,
    /// A schedule whose name leaves the number of stages per device open, such as `interleaved`.
    Unnumbered(Schedule),
    One(Schedule),
}

impl FromStr for ScheduleChoice {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "all" => Ok(Self::All),
            "interleaved" | "breadth-first" | "interleaved-zero-bubble" => {
                setting::schedule(text).map(Self::Unnumbered)
            }
            _ => setting::schedule(text).map(Self::One),
        }
    }
}
