//! The command line of `brimful plan`.

use std::path::PathBuf;

use anyhow::Result;
use brimful::Bytes;
use brimful::plan::Device;
use brimful::schedule::{Recompute, Schedule};
use clap::Args;

use crate::setting::{MODELS, ModelName};

/// Options of `brimful plan`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Options {
    /// Devices, each with one stage (or with several, see --virtual-stages).
    #[arg(long, short = 's', value_name = "N", required_unless_present = "schedule_file")]
    pub(super) stages: Option<usize>,

    /// Micro-batches of a mini-batch; for a model the best of twelve numbers if not given.
    #[arg(long, short = 'm', value_name = "N")]
    #[arg(required_unless_present_any = ["model", "profile", "schedule_file"])]
    pub(super) micro_batches: Option<usize>,

    /// Schedules to compare: all, or some of gpipe, 1f1b, interleaved, zero-bubble-h1,
    /// interleaved-zero-bubble, zero-bubble-v.
    #[arg(long, value_name = "NAME", value_delimiter = ',', default_value = "all")]
    pub(super) schedule: Vec<String>,

    /// Stages that each device holds in the interleaved schedules.
    #[arg(long, short = 'v', value_name = "N", default_value_t = 2)]
    pub(super) virtual_stages: usize,

    /// never, except-last or always; for a model the best if not given, else never.
    #[arg(long, value_name = "WHEN")]
    pub(super) recompute: Option<Recompute>,

    /// Memory of each device, as in 16GiB.
    #[arg(long, value_name = "BYTES")]
    pub(super) memory: Option<Bytes>,

    /// Run the actions of this file instead: a line for each device, cells as 2F0.
    #[arg(long, value_name = "CSV")]
    #[arg(conflicts_with_all = ["model", "profile", "schedule", "micro_batches", "stages", "recompute"])]
    pub(super) schedule_file: Option<PathBuf>,

    /// Print one JSON object.
    #[arg(long)]
    pub(super) json: bool,

    /// Draw the schedules to scale, under each other.
    #[arg(long, value_name = "FILE")]
    pub(super) svg: Option<PathBuf>,

    /// Write the best step as a trace for Perfetto (ui.perfetto.dev).
    #[arg(long, value_name = "FILE")]
    pub(super) trace: Option<PathBuf>,

    /// Write the best step of each schedule as a page, which any browser opens.
    #[arg(long, value_name = "FILE")]
    pub(super) report: Option<PathBuf>,

    #[command(flatten)]
    pub(super) numbers: Numbers,

    #[command(flatten)]
    pub(super) measured: Measured,
}

/// What one micro-batch costs on one device, in plain numbers.
#[derive(Debug, Args)]
#[command(next_help_heading = "Plain numbers")]
pub(super) struct Numbers {
    /// Time of a device's forward, in any unit.
    #[arg(long, allow_negative_numbers = true, value_name = "TIME", default_value_t = 1.0)]
    pub(super) forward: f64,

    /// Time of a device's whole backward.
    #[arg(long, allow_negative_numbers = true, value_name = "TIME", default_value_t = 2.0)]
    pub(super) backward: f64,

    /// The part of the backward that the stage before waits for [default: half].
    #[arg(long, allow_negative_numbers = true, value_name = "TIME")]
    pub(super) input_gradient: Option<f64>,

    /// The part of the backward that can wait [default: the rest].
    #[arg(long, allow_negative_numbers = true, value_name = "TIME")]
    pub(super) weight_gradient: Option<f64>,

    /// Bytes that a device's forward keeps for the backward of one micro-batch.
    #[arg(long, value_name = "BYTES")]
    pub(super) activations: Option<Bytes>,

    /// Bytes of a device's parameters with their gradients and optimizer state.
    #[arg(long, value_name = "BYTES")]
    pub(super) parameters: Option<Bytes>,
}

/// A model whose layers are or were measured.
#[derive(Debug, Args)]
#[command(next_help_heading = "A measured model")]
pub(super) struct Measured {
    #[arg(long, value_name = "NAME", requires = "batch")]
    #[arg(help = format!("Measure the layers of this model, here and now: {MODELS}"))]
    #[arg(conflicts_with_all = ["forward", "backward", "input_gradient", "weight_gradient"])]
    #[arg(conflicts_with_all = ["activations", "parameters", "profile"])]
    pub(super) model: Option<ModelName>,

    /// Where to measure it: cpu, cuda or cuda:1.
    #[arg(long, default_value = "cpu")]
    pub(super) device: String,

    /// Layers with their times and sizes, as TOML or JSON.
    #[arg(long, value_name = "FILE", requires = "batch")]
    #[arg(conflicts_with_all = ["forward", "backward", "input_gradient", "weight_gradient"])]
    #[arg(conflicts_with_all = ["activations", "parameters"])]
    pub(super) profile: Option<PathBuf>,

    /// Samples of the mini-batch.
    #[arg(long, value_name = "N")]
    pub(super) batch: Option<usize>,

    /// Bytes of optimizer state for each byte of parameters: 0 for SGD, 1 with momentum, 2 for
    /// Adam.
    #[arg(long, value_name = "FACTOR", default_value_t = 0.0)]
    pub(super) optimizer: f64,
}

const EXAMPLES: &str = "\
Examples:
  Compare all schedules on 8 devices:
      brimful plan --stages 8 --micro-batches 24 --forward 1 --backward 2

  Look at one, and draw it:
      brimful plan -s 4 -m 8 --schedule 1f1b --svg 1f1b.svg

  What fits into 16 GiB, when a micro-batch keeps 3 GiB on each device?
      brimful plan -s 4 -m 16 --activations 3GiB --parameters 2GiB --memory 16GiB

  The best way to train a model, measured on the spot:
      brimful plan --model resnet18 --batch 64 --stages 2 --memory 512MiB

  The same from measurements of your own:
      brimful plan --profile model.toml --batch 256 --stages 4 --memory 16GiB --optimizer 2

  A schedule of your own:
      brimful plan --schedule-file mine.csv --trace mine.json

A profile holds a list of layers; times are seconds a sample, sizes bytes a sample:
      [[layers]]
      name = \"stem\"
      forward = 0.0011
      backward = 0.0023
      parameter_bytes = 37632
      activation_bytes = 3211264
      output_bytes = 802816";

impl Options {
    /// A device as it was described; all are alike.
    pub(super) fn device(&self) -> Device {
        Device { memory: self.memory.map(|memory| memory.0), ..Device::default() }
    }

    pub(super) fn schedules(&self) -> Result<Vec<Schedule>> {
        let mut schedules = Vec::new();
        for name in &self.schedule {
            match name.as_str() {
                "all" => schedules.extend(Schedule::all(self.virtual_stages)),
                "interleaved" | "interleaved-zero-bubble" => {
                    let schedule = name.parse::<Schedule>()?;
                    schedules.push(schedule.with_stages_per_device(self.virtual_stages));
                }
                _ => schedules.push(name.parse()?),
            }
        }
        Ok(schedules)
    }
}
