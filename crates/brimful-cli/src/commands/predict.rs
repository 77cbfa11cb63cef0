//! `brimful predict`: what a trained model answers, sample by sample.

use std::fmt;
use std::path::PathBuf;

use anyhow::Result;
use brimful::memory::Memory;
use brimful::{Bytes, MicroBatcher, Size, split};
use clap::Args;
use serde::Serialize;
use tch::nn::{ModuleT, VarStore};
use tch::{Kind, Tensor};

use crate::data::{Dataset, Examples, Sample, SampleRequest, SampleSizes};
use crate::exit::{Exit, ensure_use, wrong_use};
use crate::files::{self, FlagFile};
use crate::output;
use crate::progress::Progress;
use crate::saved_weights::SavedWeights;
use crate::setting::{self, MODELS, ModelName, NumberType, typed, within, words};

/// Samples that are in memory together where they are streamed.
const AT_ONCE: usize = 256;

/// Options of `brimful predict`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  brimful train --save digits.safetensors
  brimful predict --weights digits.safetensors
  brimful predict --weights digits.safetensors --json | jq 'select(.class != .target)'
  brimful predict --model resnet18 --weights resnet18.ot --data ~/fashion-mnist -o answers.jsonl

The samples are those that brimful train tests on.")]
pub struct PredictOptions {
    /// A file of brimful train --save, or a safetensors or .ot file with the model's names
    #[arg(long, value_name = "FILE")]
    weights: PathBuf,
    #[arg(long, value_name = "NAME", help = format!("{MODELS} [default: as the file tells]"))]
    model: Option<ModelName>,
    #[arg(long, default_value = "digits", value_name = "NAME|PATH", help = words::DATA)]
    data: String,
    #[arg(long, value_name = "PIXELS", value_parser = words::count, help = words::IMAGE)]
    image: Option<usize>,
    /// Samples in a micro-batch: a number, auto (the fastest that fits) or largest (that fits)
    #[arg(long, default_value = "auto", value_name = "N|auto|largest")]
    #[arg(value_parser = words::micro_batch)]
    micro_batch: Size,
    #[arg(long, value_name = "BYTES", help = words::MEMORY_LIMIT)]
    memory_limit: Option<Bytes>,
    #[arg(long, value_name = "NAME", help = words::ANY_DEVICE)]
    device: Option<String>,
    #[arg(long, value_enum, default_value = "f32", help = words::DTYPE)]
    dtype: NumberType,
    #[arg(long, value_name = "N", default_value_t = 0, help = words::SEED)]
    seed: u64,
    /// Print JSON instead of text: an object a line, one for each sample
    #[arg(long)]
    json: bool,
    /// The file to write: JSON lines; printed is how many answers are right
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
}

impl PredictOptions {
    /// The files that were given, each with its flag.
    pub(crate) fn files(&self) -> Vec<FlagFile<'_>> {
        let output = files::written("--output", self.output.as_ref());
        output.into_iter().chain(files::read("--weights", Some(&self.weights))).collect()
    }
}

/// What the model says of one sample.
#[derive(Debug, PartialEq, Serialize)]
struct Prediction {
    /// Its number among the samples, from 0 on.
    index: usize,
    class: i64,
    probability: f64,
    target: i64,
    /// What its class is called, where it has a name.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    /// What its target is called: the number alone goes into JSON, where names are looked up.
    #[serde(skip)]
    right: Option<String>,
}

/// Answers every sample.
pub(crate) fn run(options: &PredictOptions) -> Result<Exit> {
    let predictions = predict(options)?;
    if let Some(path) = &options.output {
        output::file(path, &json_lines(&predictions)?)?;
    } else if options.json {
        output::line(&json_lines(&predictions)?)?;
    } else {
        predictions.iter().try_for_each(|one| output::line(&one.to_string()))?;
    }
    if !options.json {
        output::line(&summary(&predictions))?;
    }
    Ok(Exit::Done)
}

fn predict(options: &PredictOptions) -> Result<Vec<Prediction>> {
    let weights = SavedWeights::read(&options.weights)?;
    let name = weights.model(options.model)?;
    let told = weights.told("image").and_then(|pixels| pixels.parse().ok());
    let sizes = SampleSizes { image: options.image.or(told), sequence: None };
    let mut dataset = name.data(&options.data, sizes, options.seed)?;
    ensure_use!(
        matches!(dataset.sample, Sample::Image { .. }),
        "predict tells the class of images: for text there is brimful generate"
    );
    check_classes(&weights, &dataset)?;
    let layers = name.layers(&dataset.sample, 0.0);
    let layers = layers.map_err(|error| wrong_use(error.to_string()))?;
    let device = setting::device(options.device.as_deref())?;
    options.dtype.prepare(device)?;
    let memory = within(Memory::of(device)?, options.memory_limit)?;
    let _inside = memory.enter();
    let store = VarStore::new(device);
    let kind = options.dtype.kind();
    let model = layers.kind(kind).build(&store.root())?;
    weights.put_into(store.variables().into_iter().collect(), name)?;
    let mut micro = MicroBatcher::new(&store, options.micro_batch).memory(memory.clone());
    let samples = dataset.test.len();
    let at_once = dataset.test.at_once(AT_ONCE);
    let mut predictions = Vec::with_capacity(samples);
    let progress = Progress::new(samples, "samples");
    for places in split::by_size(samples, at_once)? {
        let request = SampleRequest::plain(places.clone());
        let Examples { inputs, targets, lacking } = dataset.test.bring(&request)?;
        let likeliest = micro.map(&inputs, |x: Tensor| {
            let logits = model.forward_t(&typed(&x, kind), false);
            logits.softmax(-1, Kind::Float).max_dim(-1, false)
        })?;
        let indices = places.clone().filter(|index| !lacking.contains(index));
        let made = Prediction::of(indices, likeliest, &targets, &dataset.class_names)?;
        predictions.extend(made);
        progress.advance(places.len());
    }
    Ok(predictions)
}

/// A folder with other classes would be answered with the wrong names.
fn check_classes(weights: &SavedWeights, dataset: &Dataset) -> Result<()> {
    let known = weights.class_names().unwrap_or_else(|| dataset.class_names.clone());
    ensure_use!(
        known == dataset.class_names,
        "the model knows the classes {}, but the data have {}: give it data with the same ones",
        known.join(", "),
        match dataset.class_names.is_empty() {
            true => "none with a name".to_owned(),
            false => dataset.class_names.join(", "),
        }
    );
    Ok(())
}

impl Prediction {
    /// Those of the samples of these numbers, of probabilities and classes.
    fn of(
        indices: impl Iterator<Item = usize>,
        (probabilities, classes): (Tensor, Tensor),
        targets: &Tensor,
        names: &[String],
    ) -> Result<Vec<Self>> {
        setting::check_answers(&probabilities)?;
        let probabilities = Vec::<f64>::try_from(probabilities.to_kind(Kind::Double))?;
        let classes = Vec::<i64>::try_from(classes)?;
        let targets = Vec::<i64>::try_from(targets)?;
        let answers = classes.into_iter().zip(probabilities).zip(targets);
        let prediction = |(index, ((class, probability), target))| {
            let named =
                |class| usize::try_from(class).ok().and_then(|class| names.get(class).cloned());
            let (name, right) = (named(class), named(target));
            Self { index, class, probability, target, name, right }
        };
        Ok(indices.zip(answers).map(prediction).collect())
    }
}

fn json_lines(predictions: &[Prediction]) -> Result<String> {
    predictions.iter().map(|one| Ok(serde_json::to_string(one)? + "\n")).collect()
}

fn summary(predictions: &[Prediction]) -> String {
    let right = predictions.iter().filter(|one| one.class == one.target).count();
    let share = 100.0 * right as f64 / predictions.len().max(1) as f64;
    format!("{right} of {} are right: {share:.1} %", predictions.len())
}

impl fmt::Display for Prediction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { index, class, probability, target, name, right } = self;
        write!(f, "sample {index:>5}  class {class:>3}  {:5.1} %", probability * 100.0)?;
        name.iter().try_for_each(|name| write!(f, "  {name}"))?;
        match (class == target, right) {
            (true, _) => Ok(()),
            (false, Some(right)) => write!(f, "  wrong: it is {target}, {right}"),
            (false, None) => write!(f, "  wrong: it is {target}"),
        }
    }
}
