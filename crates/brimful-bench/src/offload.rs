//! `brimful-bench offload`: a GPT with offloaded stages, against the same model on the GPU.

use std::collections::BTreeMap;

use anyhow::Result;
use brimful::internal::OffloadPlan;
use brimful::optim::{AdamW, StateFormat};
use brimful::pipeline::{Builder, Offload};
use brimful::schedule::{HostLinkUse, Location, Recompute, Schedule};
use brimful::{Bytes, DeviceSpec, Layers, MicroBatches, Pipeline};
use brimful_cli::commands::train::OptimizerState;
use brimful_cli::progress::begin_measuring;
use brimful_cli::setting::{self, accounts, words};
use brimful_models::{Gpt, gpt};
use brimful_plan::schedule::Awaited;
use clap::{Args, ValueEnum};
use serde::Serialize;
use serde_json::json;
use tch::{Device, Kind, Tensor};

use crate::journal::{Journal, Output};
use crate::staged::StagedTraining;
use crate::steady::{self, LEARNING_RATE, SteadySteps, SteadyTraining};
use crate::turns::TurnProgress;
use crate::work::Samples;

/// Size that suits fast kernels: GPT-2's 50,257 words, padded.
const VOCABULARY: i64 = 50_304;

/// Options of `brimful-bench offload`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  brimful-bench offload --device cuda:0
  brimful-bench offload --device cuda:0 --counts 16 --offload auto --memory-limit 12GB
  brimful-bench offload --device cuda:0 --layers 32 --width 3584 --heads 28 --offload host --memory-limit 14GB
  brimful-bench offload --layers 4 --width 64 --heads 4 --sequence 32")]
pub(crate) struct OffloadOptions {
    /// Transformer blocks
    #[arg(long, value_name = "N", default_value_t = 24, value_parser = words::count)]
    layers: usize,
    /// Width of the embedding
    #[arg(long, value_name = "N", default_value_t = 2048)]
    width: i64,
    /// Attention heads per block
    #[arg(long, value_name = "N", default_value_t = 16)]
    heads: i64,
    /// Tokens per sequence
    #[arg(long = "sequence", value_name = "N", default_value_t = 1024)]
    tokens: i64,
    /// Sequences per micro-batch
    #[arg(long, value_name = "N", default_value_t = 4)]
    sequences: i64,
    /// Micro-batches per mini-batch: one row per number
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "8,16")]
    counts: Vec<usize>,
    /// Offload model state to host memory: modes to compare: each is a contestant
    #[arg(
        long,
        value_name = "MODE,…",
        value_delimiter = ',',
        default_value = "device,host,host-in-backward"
    )]
    offload: Vec<OffloadArgument>,
    #[command(flatten)]
    update: OffloadedUpdate,
    /// Measured steps of each contestant
    #[arg(long, value_name = "N", default_value_t = 15, value_parser = words::count)]
    repeats: usize,
    #[arg(long, value_name = "DEVICE", help = words::DEVICE)]
    device: Option<String>,
    #[arg(long, value_name = "BYTES", help = words::MEMORY_LIMIT)]
    memory_limit: Option<Bytes>,
    #[command(flatten)]
    output: Output,
}

/// Dtypes of an offloaded update.
#[derive(Debug, Clone, Copy, Args)]
struct OffloadedUpdate {
    /// Dtype of the optimizer's averages (moments)
    #[arg(long, value_enum, value_name = "FORMAT", default_value = "f32")]
    optimizer_state: OptimizerState,
    /// Round gradients to bf16 on their way to the host
    #[arg(long)]
    bf16_gradients: bool,
    /// Keep boundaries of offloaded stages on the GPU
    #[arg(long)]
    device_boundaries: bool,
}

/// Placement of a contestant's stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OffloadArgument {
    Device,
    Host,
    /// Offloaded, with updates in the backward
    HostInBackward,
    /// As `train --offload auto` plans them within the memory limit
    Auto,
    /// As auto, with updates in the backward
    AutoInBackward,
}

impl OffloadArgument {
    pub(crate) fn contestant(self) -> &'static str {
        match self {
            Self::Device => "brimful, on the GPU",
            Self::Host => "brimful, offloaded",
            Self::HostInBackward => "brimful, offloaded, updates in the backward",
            Self::Auto => "brimful, offload planned",
            Self::AutoInBackward => "brimful, offload planned, updates in the backward",
        }
    }

    pub(crate) fn updates_in_backward(self) -> bool {
        matches!(self, Self::HostInBackward | Self::AutoInBackward)
    }
}

/// Measures and prints.
pub(crate) fn run(options: &OffloadOptions) -> Result<()> {
    let device = setting::device(options.device.as_deref())?;
    let facts = json!({ "optimizer": "adamw", "recompute": "always", "dtype": "bf16" });
    let mut journal = Journal::begin("offload", device, &options.output, facts)?;
    let progress = TurnProgress::new(
        options.offload.len() * options.counts.len() * steady::steps(options.repeats),
    );
    for &offload in &options.offload {
        progress.row(offload.contestant());
        let mut contestant = Contestant::new(options, device, offload)?;
        for &count in &options.counts {
            journal.enter(&contestant.measure(count, &progress)?)?;
        }
    }
    progress.done();
    journal.end()
}

impl OffloadOptions {
    fn layers(&self) -> Layers {
        gpt(&Gpt {
            layers: self.layers,
            width: self.width,
            heads: self.heads,
            context: self.tokens,
            vocabulary: VOCABULARY,
            dropout: 0.0,
            tied: true,
        })
    }

    fn method(&self) -> AdamW {
        AdamW::new(LEARNING_RATE).state_format(self.update.optimizer_state.format())
    }

    /// Returns the layers of each stage: the embeddings, each block, and the head.
    fn balance(&self) -> Vec<usize> {
        let mut balance = vec![1; self.layers + 2];
        balance[0] = 3;
        balance[self.layers + 1] = 2;
        balance
    }

    /// Returns a builder of the pipeline, in stages of a block each.
    fn staged(&self, device: Device, offload: OffloadArgument) -> Result<Builder> {
        let balance = self.balance();
        let schedule = breadth_first(&balance);
        Ok(self.builder(device, offload)?.balance(balance).schedule(schedule))
    }

    /// Returns a builder of the pipeline without balance and schedule.
    fn builder(&self, device: Device, offload: OffloadArgument) -> Result<Builder> {
        let builder = Pipeline::builder(self.layers())
            .devices(accounts(&[device], self.memory_limit)?.into_iter().map(DeviceSpec::from))
            .recompute(Recompute::Always)
            .kind(Kind::BFloat16)
            .reserve(self.method())
            .update_in_backward(offload.updates_in_backward());
        Ok(match self.update.bf16_gradients {
            true => builder.offload_gradients(Kind::BFloat16),
            false => builder,
        })
    }

    /// Plans which stages of this pipeline are offloaded, for the largest number of micro-batches.
    fn plan(&self, builder: Builder, device: Device) -> Result<OffloadPlan> {
        let most = self.counts.iter().copied().max().unwrap_or(1);
        let tokens = [self.sequences, self.tokens];
        let micro_batch = Tensor::randint(VOCABULARY, tokens, (Kind::Int64, device));
        let layers = self.layers().len() + 1;
        // The targets are tokens too.
        let sampled = builder
            .offload(Offload::Auto { gpu: None, host: None })
            .micro_batches(MicroBatches::Count(most))
            .sample((&micro_batch, &micro_batch), loss, self.sequences as usize * most);
        Ok(sampled.plan_offload(0, begin_measuring(layers, device))?)
    }
}

fn breadth_first(balance: &[usize]) -> Schedule {
    Schedule::BreadthFirst { stages_per_device: balance.len() }
}

fn loss(logits: &Tensor, tokens: &Tensor) -> Tensor {
    let rows = logits.view([-1, VOCABULARY]).to_kind(Kind::Float);
    rows.cross_entropy_for_logits(&tokens.view([-1]))
}

/// Returns the reason of a placement that a plan chose stage by stage, with its boundaries.
fn reason(plan: &OffloadPlan) -> Option<String> {
    matches!(plan, OffloadPlan::Planned { .. }).then(|| plan.to_string())
}

struct Contestant<'a> {
    options: &'a OffloadOptions,
    offload: OffloadArgument,
    training: StagedTraining,
    parameters: u64,
    /// Reason of a planned placement.
    why: Option<String>,
}

impl<'a> Contestant<'a> {
    fn new(options: &'a OffloadOptions, device: Device, offload: OffloadArgument) -> Result<Self> {
        let parameters = options.layers().parameter_count()?;
        let builder = || options.builder(device, offload);
        let staged = || options.staged(device, offload);
        let planned = match offload {
            OffloadArgument::Auto | OffloadArgument::AutoInBackward => {
                Some(options.plan(builder()?, device)?)
            }
            _ => None,
        };
        let why = planned.as_ref().and_then(reason);
        let builder = match (planned, offload) {
            (Some(OffloadPlan::Planned { row, .. }), _) => builder()?.plan(&row),
            (Some(OffloadPlan::Device), _) | (None, OffloadArgument::Device) => staged()?,
            _ => staged()?.offload(Offload::Host),
        };
        let builder = match options.update.device_boundaries && why.is_none() {
            true => builder.boundaries(Location::Device),
            false => builder,
        };
        let training = StagedTraining::new(builder, options.method(), loss)?;
        Ok(Self { options, offload, training, parameters, why })
    }

    fn measure(&mut self, count: usize, progress: &TurnProgress) -> Result<OffloadRow> {
        let Self { options, offload, training, parameters, why } = self;
        training.pipeline.set_micro_batches(MicroBatches::Count(count));
        let samples = options.sequences * count as i64;
        let place = (Kind::Int64, training.pipeline.output_device());
        let tokens = || Tensor::randint(VOCABULARY, [samples, options.tokens], place);
        let batch = (tokens(), tokens());
        let following = (offload.contestant(), progress);
        let steady = SteadySteps::measure(training, &batch, options.repeats, following)?;
        Ok(OffloadRow {
            contestant: offload.contestant(),
            host_link: profile(training, &batch)?,
            parameters: *parameters,
            shape: format!("{}×{}×{}", options.layers, options.width, options.tokens),
            heads: options.heads,
            stages: training.pipeline.balance().sizes().len(),
            offloaded_stages: training.pipeline.offloaded_stages()?,
            plan: why.clone(),
            micro_batches: count,
            sequences: options.sequences,
            repeats: options.repeats,
            tokens_per_s: (samples * options.tokens) as f64 / steady.seconds,
            peak_bytes: steady.last.peak(),
            optimizer_state: options.update.optimizer_state.format(),
            // Reports flags only if they had an effect: updates in the backward keep no gradients, and a plan sets
            // boundaries itself.
            bf16_gradients: options.update.bf16_gradients && !offload.updates_in_backward(),
            device_boundaries: options.update.device_boundaries && why.is_none(),
            losses: [steady.first_loss, steady.last.loss],
            steady,
            memory_limit: options.memory_limit.map(|limit| limit.to_string()),
        })
    }
}

/// Profiles one more step with timed transfers. This step is not one of the measured steps, because timing costs
/// time. An update comes before it, as before every measured step.
fn profile(training: &mut StagedTraining, batch: &Samples) -> Result<HostLinkProfile> {
    training.backward(batch)?;
    training.update()?;
    training.pipeline.trace_transfers(true);
    let step = training.backward(batch)?;
    training.pipeline.trace_transfers(false);
    training.update()?;
    training.wait()?;
    let host_links = step.timeline.map(|timeline| timeline.host_links).unwrap_or_default();
    Ok(host_links.first().map(HostLinkProfile::of).unwrap_or_default())
}

/// Transfers over the host link in a step, and how long compute waited for each kind.
#[derive(Debug, Default, Serialize)]
struct HostLinkProfile {
    bytes_in: u64,
    bytes_out: u64,
    seconds_in: f64,
    seconds_out: f64,
    waited: BTreeMap<Awaited, f64>,
}

impl HostLinkProfile {
    fn of(host_link: &HostLinkUse) -> Self {
        let mut profile = Self::default();
        for span in &host_link.transfers {
            let (bytes, seconds) = match span.transfer.kind.is_inward() {
                true => (&mut profile.bytes_in, &mut profile.seconds_in),
                false => (&mut profile.bytes_out, &mut profile.seconds_out),
            };
            *bytes += span.bytes;
            *seconds += span.end - span.start;
        }
        for wait in &host_link.waits {
            *profile.waited.entry(wait.awaited).or_default() += wait.end - wait.start;
        }
        profile
    }
}

#[derive(Debug, Serialize)]
struct OffloadRow {
    contestant: &'static str,
    host_link: HostLinkProfile,
    parameters: u64,
    shape: String,
    heads: i64,
    stages: usize,
    offloaded_stages: usize,
    /// Planned placement and its reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    plan: Option<String>,
    micro_batches: usize,
    sequences: i64,
    repeats: usize,
    #[serde(flatten)]
    steady: SteadySteps,
    tokens_per_s: f64,
    peak_bytes: Option<Bytes>,
    optimizer_state: StateFormat,
    bf16_gradients: bool,
    device_boundaries: bool,
    /// Losses of the first step and the last, on the same mini-batch.
    losses: [f64; 2],
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_limit: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Otherwise the row would have a plan that nobody made, and `--device-boundaries` would have no effect.
    #[test]
    fn what_was_not_planned_stage_by_stage_has_no_reason() {
        assert_eq!(reason(&OffloadPlan::Host), None);
        assert_eq!(reason(&OffloadPlan::Device), None);
    }
}
