//! `brimful evaluate`: loss, perplexity and accuracy of a model on data.

use std::fmt;
use std::path::PathBuf;

use anyhow::{Context, Result, anyhow};
use brimful::Layers;
use brimful_plan::split;
use clap::Args;
use serde::Serialize;
use tch::Kind;

use crate::data::{Dataset, Rows, Sample, SampleRequest, SampleWishes};
use crate::exit::{Exit, ensure_use, wrong_use};
use crate::files::{self, FlagFile};
use crate::output;
use crate::progress::Progress;
use crate::saved_weights::{LoadedModel, PIXELS, SavedWeights, Weights};
use crate::setting::{
    ANY_MODEL, ANY_MODELS, EvaluationPlace, LossModel, ModelName, ModelSource, NumberType, counted,
    typed, words,
};

/// Number of samples in memory at once, if samples are loaded on demand.
const AT_ONCE: usize = 256;

/// Options of `brimful evaluate`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  brimful evaluate --weights digits.safetensors
  brimful evaluate --weights gpt.safetensors --data book.txt
  brimful evaluate --model ./llama --data chat.jsonl --sequence 1024 --dtype bf16
  brimful evaluate --model ./llama --adapter llama-chat --data held-out.jsonl --all --json

The samples are those that train holds out for tests, or all of them with --all.")]
pub struct EvaluateOptions {
    #[arg(long, value_name = "MODEL")]
    #[arg(help = format!("{ANY_MODEL} [default: stored]"))]
    #[arg(long_help = format!("{ANY_MODELS} [default: stored in the file]"))]
    model: Option<ModelSource>,
    /// Weights: a file of train --save, or any safetensors file
    ///
    /// In any other file, the tensors must have the names of the model's variables
    #[arg(long, value_name = "FILE")]
    weights: Option<PathBuf>,
    /// LoRA adapter: a folder written by train --save or PEFT
    #[arg(long, value_name = "FOLDER")]
    adapter: Option<PathBuf>,
    #[arg(long, default_value = "digits", value_name = "DATA")]
    #[arg(help = words::DATA, long_help = words::DATA_FORMS)]
    data: String,
    /// Tokens per sequence [default: as trained, else 64]
    #[arg(long, value_name = "N", value_parser = words::count)]
    sequence: Option<usize>,
    /// Image size in pixels [default: as trained, else 224]
    #[arg(long, value_name = "PIXELS", value_parser = words::count)]
    image: Option<usize>,
    /// Evaluate all samples, not only those that train holds out
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    place: EvaluationPlace,
    #[arg(long, value_enum, help = format!("{} [default: stored in the file]", words::DTYPE))]
    dtype: Option<NumberType>,
    #[arg(long, value_name = "N", default_value_t = 0, help = words::SEED)]
    seed: u64,
    #[arg(long, help = words::JSON)]
    json: bool,
}

/// Metrics of a model on data.
#[derive(Debug, Serialize)]
struct Evaluation {
    loss: f64,
    /// Perplexity, for text only.
    #[serde(skip_serializing_if = "Option::is_none")]
    perplexity: Option<f64>,
    /// Share of correct answers.
    accuracy: f64,
    samples: usize,
    /// Number of targets (tokens, classes or pixels) that are not ignored.
    targets: u64,
}

/// A model with its data, before it is moved to a device.
#[derive(Debug)]
struct Evaluated {
    dataset: Dataset,
    layers: Layers,
    weights: Weights,
}

impl EvaluateOptions {
    /// Lists the given files, each with its flag.
    pub(crate) fn files(&self) -> Vec<FlagFile> {
        files::read("--weights", self.weights.as_ref()).into_iter().collect()
    }
}

/// Evaluates the model and prints the metrics.
pub(crate) fn run(options: &EvaluateOptions) -> Result<Exit> {
    let evaluated = Evaluated::open(options)?;
    output::report(&evaluated.evaluate(options)?, options.json)?;
    Ok(Exit::Done)
}

impl Evaluated {
    fn open(options: &EvaluateOptions) -> Result<Self> {
        let EvaluateOptions { model, weights, adapter, .. } = options;
        let weights = Weights::open(model.as_ref(), weights.as_deref(), adapter.as_deref())?;
        let (dataset, layers) = match &weights {
            Weights::File(weights, name) => of_file(weights, *name, options)?,
            Weights::Folder(folder) => {
                (folder.data(&options.data, options.sequence, options.seed)?, folder.layers())
            }
        };
        Ok(Self { dataset, layers, weights })
    }

    fn evaluate(self, options: &EvaluateOptions) -> Result<Evaluation> {
        let Self { mut dataset, layers, weights } = self;
        let loaded = weights.load(layers, &options.place, options.dtype, |layers, root| {
            LossModel::build(layers, root).context("the model cannot be built")
        })?;
        let LoadedModel { model, kind, mut micro, memory } = loaded;
        let _inside = memory.enter();
        let judge = |(x, y): (Rows, Rows)| model.judge(&typed(&x, kind), &y);
        let Dataset { train, test, sample, .. } = &mut dataset;
        let mut sums = Sums::default();
        let halves = [Some(test), Some(train).filter(|_| options.all)];
        for half in halves.into_iter().flatten() {
            let progress = Progress::new(half.len(), "samples");
            for places in split::by_size(half.len(), half.at_once(AT_ONCE))? {
                let examples = half.bring(&SampleRequest::plain(places.clone()))?;
                let (samples, targets) = (examples.len(), counted(&examples.targets));
                let judged = micro.evaluate(&examples.into_batch()?, judge);
                let judged = judged.map_err(|error| match error.non_finite() {
                    Some(value) => anyhow!("{value}: the weights are no numbers that a model can have: was its training?"),
                    None => error.into(),
                })?;
                let right = judged.outputs.to_kind(Kind::Double).sum(Kind::Double);
                sums.add(samples, targets.double_value(&[]), judged.loss, right.double_value(&[]));
                progress.advance(places.len());
            }
        }
        Ok(sums.evaluation(matches!(sample, Sample::Sequence { .. })))
    }
}

/// Opens the data for a model whose weights are in a file. Also returns the model's layers.
fn of_file(
    weights: &SavedWeights,
    name: ModelName,
    options: &EvaluateOptions,
) -> Result<(Dataset, Layers)> {
    let number = |key| weights.told(key).and_then(|number| number.parse().ok());
    let context = weights.rows("wpe.weight").map(|rows| rows as usize);
    let wishes = SampleWishes {
        sequence: options.sequence.or(context),
        image: options.image.or_else(|| number("image")),
        pixels: weights.told(PIXELS).and_then(|text| text.parse().ok()),
    };
    let dataset = name.data(&options.data, wishes, options.seed)?;
    let known = weights.class_names().unwrap_or_else(|| dataset.class_names.clone());
    ensure_use!(
        known == dataset.class_names,
        "the model has the classes {}, but the data {}: give data with the same classes",
        known.join(", "),
        match dataset.class_names.is_empty() {
            true => "none with names".to_owned(),
            false => dataset.class_names.join(", "),
        }
    );
    let layers = name.layers(&dataset.sample, 0.0);
    let layers = layers.map_err(|error| wrong_use(error.to_string()))?;
    Ok((dataset, layers))
}

/// Totals over the mini-batches. The loss is weighted by the number of targets.
#[derive(Debug, Default)]
struct Sums {
    samples: usize,
    targets: f64,
    loss: f64,
    right: f64,
}

impl Sums {
    fn add(&mut self, samples: usize, targets: f64, loss: f64, right: f64) {
        self.samples += samples;
        self.targets += targets;
        self.loss += loss * targets;
        self.right += right;
    }

    fn evaluation(&self, is_text: bool) -> Evaluation {
        let loss = self.loss / self.targets;
        Evaluation {
            loss,
            perplexity: is_text.then(|| loss.exp()),
            accuracy: self.right / self.targets,
            samples: self.samples,
            targets: self.targets as u64,
        }
    }
}

impl fmt::Display for Evaluation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { loss, perplexity, accuracy, samples, targets } = self;
        write!(f, "loss {loss:.4}")?;
        perplexity.iter().try_for_each(|perplexity| write!(f, "  perplexity {perplexity:.2}"))?;
        write!(
            f,
            "  accuracy {:.1} %  of {}",
            accuracy * 100.0,
            output::numbered(*samples, "sample")
        )?;
        match *targets == *samples as u64 {
            true => Ok(()),
            false => write!(f, ", {targets} targets"),
        }
    }
}
