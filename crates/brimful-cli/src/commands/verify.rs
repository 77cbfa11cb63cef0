//! `brimful verify`: compares the full batch's gradients with those of its micro-batches, parameter by parameter.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::Result;
use brimful::layers::Model;
use brimful::{Loss, MicroBatcher, MicroBatches, Pipeline, batch, device};
use clap::Args;
use serde::Serialize;
use tch::nn::{ModuleT, VarStore};
use tch::{Kind, Tensor};

use crate::data::{self, Examples, Synthetic};
use crate::exit::Exit;
use crate::output;
use crate::setting::{
    DROPOUT, MODEL, MODELS, ModelName, NormStatistics, NumberType, clear_gradients, loss, typed,
    words,
};

/// Options of `brimful verify`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  brimful verify --model gpt --batch-size 65 --micro-batch-size 16
  brimful verify --model resnet18 --batch-size 10 --micro-batch-size 4 --dtype f32

  brimful verify --model resnet18 --batch-size 10 --micro-batch-size 2 --batch-norm exact

The gradients are compared in evaluation mode: in training mode, dropout and BatchNorm depend on the
micro-batches. With --batch-norm they are compared in training mode, where only exact statistics
are those of the full batch.")]
pub struct VerifyOptions {
    #[arg(long, default_value = "mlp", value_name = "MODEL")]
    #[arg(help = MODEL, long_help = MODELS)]
    model: ModelName,
    #[arg(long, value_name = "N", default_value_t = 65, value_parser = words::count)]
    #[arg(help = words::BATCH_SIZE)]
    batch_size: usize,
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = words::count)]
    #[arg(help = words::MICRO_BATCH)]
    micro_batch_size: usize,
    /// Largest relative error to accept as rounding [default: by --dtype]
    #[arg(long, value_name = "ERROR", value_parser = words::not_negative)]
    tolerance: Option<f64>,
    #[arg(long, value_enum, default_value = "f64", help = words::DTYPE)]
    dtype: NumberType,
    #[arg(long, value_enum, value_name = "WHICH", help = words::BATCH_NORM)]
    batch_norm: Option<NormStatistics>,
    #[arg(long, value_name = "NAME", default_value = "cpu", help = words::DEVICE)]
    device: String,
    #[arg(long, value_name = "N", default_value_t = 0, help = words::SEED)]
    #[arg(value_parser = words::seed)]
    seed: u64,
    #[arg(long, help = words::JSON)]
    json: bool,
}

/// Compares the gradients, and returns a fault if a gradient differs by more than rounding.
pub(crate) fn run(options: &VerifyOptions) -> Result<Exit> {
    let subject = VerifiedModel::new(options)?;
    let full = subject.gradients(MicroBatches::Count(1))?;
    let size = MicroBatches::Samples(options.micro_batch_size);
    let split = match options.batch_norm {
        Some(NormStatistics::Exact) => subject.exact_gradients(options, size)?,
        _ => subject.gradients(size)?,
    };
    let report = VerifyReport::new(options, &full, &split);
    output::report(&report, options.json)?;
    Ok(if report.ok { Exit::Done } else { Exit::Fault })
}

struct VerifiedModel {
    store: VarStore,
    model: Model,
    examples: (Tensor, Tensor),
    kind: Kind,
    /// True if the model runs in training mode.
    trains: bool,
}

/// Results of a backward: the loss, the micro-batch sizes, and the gradient of each parameter.
struct Gradients {
    loss: f64,
    sizes: Vec<usize>,
    named: BTreeMap<String, Tensor>,
}

impl VerifiedModel {
    fn new(options: &VerifyOptions) -> Result<Self> {
        let sample = options.model.synthetic_sample();
        // This model gets the whole mini-batch as its only micro-batch, so deferred statistics are exact here.
        let statistics = match options.batch_norm {
            Some(NormStatistics::Exact) => Some(NormStatistics::Deferred),
            other => other,
        };
        let layers = options.model.layers_normed(&sample, DROPOUT, statistics)?;
        let (train, seed) = (options.batch_size, options.seed);
        let Examples { inputs, targets, .. } =
            data::synthetic(&Synthetic { sample, train, test: 1, seed })?.train.all()?;
        tch::manual_seed(i64::from_ne_bytes(seed.to_ne_bytes()));
        let device = device::find(&options.device)?;
        options.dtype.prepare(device)?;
        let store = VarStore::new(device);
        let kind = options.dtype.kind();
        let model = layers.kind(kind).build(&store.root())?;
        let trains = options.batch_norm.is_some();
        Ok(Self { store, model, examples: (inputs, targets), kind, trains })
    }

    fn gradients(&self, size: MicroBatches) -> Result<Gradients> {
        let mut micro = MicroBatcher::new(&self.store, size);
        let whole = batch::slice(&self.examples, 0..batch::len(&self.examples)?)?;
        let step = micro.backward(&whole, |(x, y)| {
            let logits = self.model.forward_t(&typed(&x, self.kind), self.trains);
            Loss::mean(loss(&logits, &y))
        })?;
        let gradient = |(name, variable): (String, Tensor)| {
            let gradient = variable.grad();
            gradient.defined().then(|| (name, gradient.to_kind(Kind::Double).copy()))
        };
        let named = self.store.variables().into_iter().filter_map(gradient).collect();
        clear_gradients(&self.store)?;
        Ok(Gradients { loss: step.loss, sizes: step.sizes, named })
    }

    /// Computes the gradients in a pipeline with the same parameters and exact BatchNorms. Exact BatchNorms need a
    /// pipeline, because they have a barrier across micro-batches.
    fn exact_gradients(&self, options: &VerifyOptions, size: MicroBatches) -> Result<Gradients> {
        let sample = options.model.synthetic_sample();
        let layers = options.model.layers_normed(&sample, DROPOUT, options.batch_norm)?;
        let mut pipeline = Pipeline::builder(layers)
            .devices([device::find(&options.device)?])
            .micro_batches(size)
            .kind(self.kind)
            .build()?;
        pipeline.set_variables(self.store.variables().into_iter().collect())?;
        let (x, y) = &self.examples;
        let x = typed(x, self.kind);
        let step = pipeline.backward(&x, y, |out: Tensor, y: &Tensor| Loss::mean(loss(&out, y)))?;
        let gradients = pipeline.gradients()?.into_iter();
        let named = gradients.map(|(name, gradient)| (name, gradient.to_kind(Kind::Double)));
        Ok(Gradients { loss: step.loss, sizes: step.sizes, named: named.collect() })
    }
}

#[derive(Debug, Serialize)]
struct VerifyReport {
    model: ModelName,
    dtype: NumberType,
    batch: usize,
    sizes: Vec<usize>,
    parameters: usize,
    loss: f64,
    loss_difference: f64,
    max_relative_error: f64,
    parameter: String,
    tolerance: f64,
    ok: bool,
}

impl VerifyReport {
    fn new(options: &VerifyOptions, full: &Gradients, split: &Gradients) -> Self {
        let names = full.named.keys().chain(split.named.keys());
        let errors = names.map(|name| match (full.named.get(name), split.named.get(name)) {
            (Some(full), Some(split)) => {
                let scale = full.abs().max().double_value(&[]).max(f64::MIN_POSITIVE);
                ((full - split).abs().max().double_value(&[]) / scale, name)
            }
            // Only the full batch, or only the micro-batches, gave this parameter a gradient.
            _ => (f64::INFINITY, name),
        });
        let worst = errors.max_by(|a, b| a.0.total_cmp(&b.0));
        let (max_relative_error, parameter) =
            worst.map_or((f64::NAN, ""), |(e, n)| (e, n.as_str()));
        let tolerance = options.tolerance.unwrap_or(match options.dtype {
            NumberType::F64 => 1e-9,
            NumberType::F32 => 1e-3,
            NumberType::Tf32 => 1e-2,
            NumberType::Bf16 => 1e-1,
        });
        Self {
            model: options.model,
            dtype: options.dtype,
            batch: options.batch_size,
            sizes: split.sizes.clone(),
            parameters: full.named.len(),
            loss: full.loss,
            loss_difference: (full.loss - split.loss).abs(),
            max_relative_error,
            parameter: parameter.to_owned(),
            tolerance,
            ok: max_relative_error <= tolerance,
        }
    }
}

impl fmt::Display for VerifyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}, {} samples cut into {:?}", self.model, self.batch, self.sizes)?;
        writeln!(
            f,
            "loss                    {:.6}, off by {:.1e}",
            self.loss, self.loss_difference
        )?;
        writeln!(f, "parameters compared     {}", self.parameters)?;
        writeln!(
            f,
            "largest relative error  {:.2e}, of {}",
            self.max_relative_error, self.parameter
        )?;
        let verdict = if self.ok { "equal up to rounding" } else { "NOT equal" };
        writeln!(f, "full and split are      {verdict} (at most {:.0e})", self.tolerance)
    }
}
