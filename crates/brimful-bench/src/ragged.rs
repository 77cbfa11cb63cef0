//! `brimful-bench ragged`: texts of different lengths, in micro-batches cut by tokens or by samples.
//!
//! All contestants train the same GPT on the same mini-batch. The maximum number of positions per micro-batch is
//! the same for all; the share of padding differs.

use std::fs;

use anyhow::{Result, ensure};
use brimful::batch::Sequences;
use brimful::{Loss, MicroBatcher, MicroBatches};
use brimful_cli::setting::{self, words};
use brimful_models::{Gpt, gpt};
use clap::Args;
use serde::Serialize;
use serde_json::json;
use tch::nn::{ModuleT, VarStore};
use tch::{Device, Kind, Reduction, Tensor};

use crate::journal::{Journal, Output};
use crate::timed::timed;
use crate::times::StepTimes;
use crate::turns::TurnProgress;

/// Median number of tokens of a text.
const MEDIAN: f64 = 200.0;
/// Standard deviation of the logarithms of lengths.
const SPREAD: f64 = 1.0;
/// Most tokens of a text; longer ones are truncated.
const LONGEST: i64 = 1024;
const VOCABULARY: i64 = 4096;
/// Target that cross-entropy ignores.
const IGNORED: i64 = -100;
/// Tolerance of gradients in f64, relative to the largest value.
const TOLERANCE: f64 = 1e-10;
/// Samples whose gradients are compared.
const COMPARED: i64 = 12;
const WARM_UP: usize = 1;

/// Options of `brimful-bench ragged`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  brimful-bench ragged
  brimful-bench ragged --device cuda:0 --layers 12 --width 768 --heads 12 --batch-size 512 --token-budget 16384
  brimful-bench ragged --layers 1 --width 32 --heads 2 --batch-size 8 --repeats 1")]
pub(crate) struct RaggedOptions {
    /// Transformer blocks
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = words::count)]
    layers: usize,
    /// Width of the embedding
    #[arg(long, value_name = "N", default_value_t = 256)]
    width: i64,
    /// Attention heads per block
    #[arg(long, value_name = "N", default_value_t = 4)]
    heads: i64,
    #[arg(long, value_name = "N", default_value_t = 64, help = words::BATCH_SIZE)]
    #[arg(value_parser = clap::value_parser!(i64).range(1..))]
    batch_size: i64,
    /// Tokens per micro-batch, with padding
    #[arg(long, value_name = "N", default_value_t = 4 * LONGEST)]
    #[arg(value_parser = clap::value_parser!(i64).range(LONGEST..))]
    token_budget: i64,
    /// Measured steps of each contestant
    #[arg(long, value_name = "N", default_value_t = 15, value_parser = words::count)]
    repeats: usize,
    #[arg(long, value_name = "DEVICE", help = words::DEVICE)]
    device: Option<String>,
    #[command(flatten)]
    output: Output,
}

/// Way of cutting the mini-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RaggedCut {
    /// Cuts by samples, which are all padded to the longest of the mini-batch.
    Samples,
    /// Cuts by samples in a hand-written loop, with each micro-batch padded to its longest sample.
    Loop,
    /// Cuts by tokens, with samples of similar length together.
    Tokens,
}

/// Cuts, and the contestants that use them.
const CUTS: [(RaggedCut, &str); 3] = [
    (RaggedCut::Samples, "brimful, by samples"),
    (RaggedCut::Loop, "tch loop"),
    (RaggedCut::Tokens, "brimful, by tokens"),
];

/// Measures and prints.
pub(crate) fn run(options: &RaggedOptions) -> Result<()> {
    let device = setting::device(options.device.as_deref())?;
    let facts = json!({ "optimizer": "none", "dtype": "f32" });
    let mut journal = Journal::begin("ragged", device, &options.output, facts)?;
    let progress = TurnProgress::new(WARM_UP + options.repeats);
    progress.row("ragged");
    tch::manual_seed(7);
    let texts = Texts::made_up(options.batch_size, device);
    let difference = gradient_difference(options, &texts.first(COMPARED), device)?;
    let mut trained = RaggedModel::new(options, Kind::Float, device)?;
    let mut all = CUTS.map(RaggedFigures::new);
    for turn in 0..WARM_UP + options.repeats {
        for figures in &mut all {
            progress.turn("ragged", figures.contestant, turn, WARM_UP, options.repeats);
            figures.take_turn(&mut trained, &texts, turn >= WARM_UP)?;
        }
        progress.advance(1);
    }
    progress.done();
    for figures in &all {
        journal.enter(&figures.row(options, texts.tokens(), difference))?;
    }
    journal.end()
}

/// Figures of a contestant.
struct RaggedFigures {
    cut: RaggedCut,
    contestant: &'static str,
    times: StepTimes,
    /// CPU seconds of the process's threads: other load on the machine does not change them.
    computed: StepTimes,
    micro_batches: usize,
}

impl RaggedFigures {
    fn new((cut, contestant): (RaggedCut, &'static str)) -> Self {
        let (times, computed) = (StepTimes::default(), StepTimes::default());
        Self { cut, contestant, times, computed, micro_batches: 0 }
    }

    fn take_turn(&mut self, trained: &mut RaggedModel, texts: &Texts, counts: bool) -> Result<()> {
        let (device, computed) = (trained.store.device(), computed_seconds());
        let (micro_batches, seconds) = timed(device, || trained.backward(self.cut, texts))?;
        self.micro_batches = micro_batches;
        self.times.push_if(counts, seconds);
        if let (true, Some(before), Some(after)) = (counts, computed, computed_seconds()) {
            self.computed.push(after - before);
        }
        Ok(())
    }

    fn row(&self, options: &RaggedOptions, tokens: i64, gradient_difference: f64) -> RaggedRow {
        let seconds = self.times.median();
        RaggedRow {
            contestant: self.contestant,
            shape: format!("{}×{}", options.layers, options.width),
            heads: options.heads,
            batch: options.batch_size,
            token_budget: options.token_budget,
            tokens,
            micro_batches: self.micro_batches,
            repeats: options.repeats,
            seconds,
            spread: self.times.spread(),
            cpu_seconds: (!self.computed.0.is_empty()).then(|| self.computed.median()),
            tokens_per_s: tokens as f64 / seconds,
            gradient_difference,
        }
    }
}

/// Returns the CPU seconds of this process so far, over all threads, if Linux reports them.
fn computed_seconds() -> Option<f64> {
    let text = fs::read_to_string("/proc/self/stat").ok()?;
    let after_the_name = text.rsplit_once(')')?.1;
    let fields: Vec<&str> = after_the_name.split_whitespace().collect();
    // User and system time, in hundredths of a second.
    let ticks = [fields.get(11)?, fields.get(12)?].map(|ticks| ticks.parse::<f64>());
    let [Ok(own), Ok(system)] = ticks else { return None };
    Some((own + system) / 100.0)
}

/// Returns the largest difference between the cuts' gradients in f64, relative to their largest value.
fn gradient_difference(options: &RaggedOptions, texts: &Texts, device: Device) -> Result<f64> {
    let mut model = RaggedModel::new(options, Kind::Double, device)?;
    let mut gradients = Vec::new();
    for (cut, _) in CUTS {
        model.backward(cut, texts)?;
        let flat = model.store.trainable_variables();
        let flat: Vec<Tensor> =
            flat.iter().map(|variable| variable.grad().flatten(0, -1)).collect();
        gradients.push(Tensor::cat(&flat, 0));
    }
    let scale = gradients[0].abs().max().double_value(&[]);
    let apart = |other: &Tensor| (other - &gradients[0]).abs().max().double_value(&[]) / scale;
    let difference = gradients.iter().map(apart).fold(0.0, f64::max);
    ensure!(difference <= TOLERANCE, "the contestants' gradients differ by {difference:e}");
    Ok(difference)
}

/// Texts, and a target for each of their tokens.
struct Texts {
    inputs: Vec<Tensor>,
    targets: Vec<Tensor>,
}

impl Texts {
    fn made_up(count: i64, device: Device) -> Self {
        let lengths = (Tensor::randn([count], (Kind::Double, Device::Cpu)) * SPREAD).exp() * MEDIAN;
        let lengths = lengths.clamp(1.0, LONGEST as f64).to_kind(Kind::Int64);
        let tokens = |at| {
            let length = lengths.int64_value(&[at]);
            Tensor::randint(VOCABULARY, [length], (Kind::Int64, Device::Cpu)).to_device(device)
        };
        let inputs = (0..count).map(tokens).collect();
        Self { inputs, targets: (0..count).map(tokens).collect() }
    }

    /// Returns the first texts.
    fn first(&self, count: i64) -> Self {
        let first =
            |all: &[Tensor]| all.iter().take(count as usize).map(Tensor::shallow_clone).collect();
        Self { inputs: first(&self.inputs), targets: first(&self.targets) }
    }

    fn tokens(&self) -> i64 {
        self.inputs.iter().map(|text| text.size()[0]).sum()
    }
}

/// Pads texts to the length of the longest.
fn padded(texts: &[Tensor], padding: i64) -> Tensor {
    Tensor::pad_sequence(texts, true, padding as f64, "right")
}

/// GPT with both ways to cut its mini-batches.
struct RaggedModel {
    store: VarStore,
    model: brimful::layers::Model,
    by_samples: MicroBatcher,
    by_tokens: MicroBatcher,
    /// Samples of a micro-batch that is cut by samples.
    samples: usize,
}

impl RaggedModel {
    fn new(options: &RaggedOptions, kind: Kind, device: Device) -> Result<Self> {
        let shape = Gpt {
            layers: options.layers,
            width: options.width,
            heads: options.heads,
            context: LONGEST,
            vocabulary: VOCABULARY,
            dropout: 0.0,
            tied: true,
        };
        let store = VarStore::new(device);
        let model = gpt(&shape).kind(kind).build(&store.root())?;
        let samples = (options.token_budget / LONGEST) as usize;
        let by_samples = MicroBatcher::new(&store, MicroBatches::Samples(samples));
        let by_tokens =
            MicroBatcher::new(&store, MicroBatches::Tokens(options.token_budget as usize));
        Ok(Self { store, model, by_samples, by_tokens, samples })
    }

    /// Computes the mini-batch's gradients from zero; returns the number of micro-batches.
    fn backward(&mut self, cut: RaggedCut, texts: &Texts) -> Result<usize> {
        for mut variable in self.store.trainable_variables() {
            variable.zero_grad();
        }
        match cut {
            RaggedCut::Samples => {
                let batch = (padded(&texts.inputs, 0), padded(&texts.targets, IGNORED));
                let loss = |(x, y): (Tensor, Tensor)| mean_loss(&self.model, &x, &y);
                Ok(self.by_samples.backward(&batch, loss)?.sizes.len())
            }
            RaggedCut::Tokens => {
                let inputs = Sequences::new(&texts.inputs, 0.0)?;
                let targets = Sequences::new(&texts.targets, IGNORED as f64)?;
                let loss = |(x, y): (Sequences, Sequences)| mean_loss(&self.model, &x, &y);
                Ok(self.by_tokens.backward(&(inputs, targets), loss)?.sizes.len())
            }
            RaggedCut::Loop => {
                let parts =
                    texts.inputs.chunks(self.samples).zip(texts.targets.chunks(self.samples));
                let count = parts.len();
                for (inputs, targets) in parts {
                    let (x, y) = (padded(inputs, 0), padded(targets, IGNORED));
                    (sum_loss(&self.model, &x, &y) / texts.tokens()).backward();
                }
                Ok(count)
            }
        }
    }
}

fn mean_loss(model: &brimful::layers::Model, x: &Tensor, y: &Tensor) -> Loss {
    Loss::ratio(sum_loss(model, x, y), y.ne(IGNORED).sum(Kind::Double))
}

fn sum_loss(model: &brimful::layers::Model, x: &Tensor, y: &Tensor) -> Tensor {
    let logits = model.forward_t(x, true).flatten(0, 1);
    logits.cross_entropy_loss(&y.flatten(0, 1), None::<Tensor>, Reduction::Sum, IGNORED, 0.0)
}

#[derive(Debug, Serialize)]
struct RaggedRow {
    contestant: &'static str,
    shape: String,
    heads: i64,
    batch: i64,
    token_budget: i64,
    /// Tokens of the mini-batch, without padding.
    tokens: i64,
    micro_batches: usize,
    repeats: usize,
    /// Median of the steps: forward and backward.
    seconds: f64,
    /// (Longest − shortest) / median of the steps.
    spread: f64,
    /// Median CPU seconds of the process's threads in a step.
    cpu_seconds: Option<f64>,
    tokens_per_s: f64,
    /// Difference between the contestants in f64, relative to the largest value.
    gradient_difference: f64,
}
