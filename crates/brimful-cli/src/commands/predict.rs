//! `brimful predict`: prints a trained model's prediction for each sample.

use std::fmt;
use std::path::PathBuf;

use anyhow::{Context, Result};
use brimful_plan::split;
use clap::Args;
use serde::Serialize;
use tch::nn::ModuleT;
use tch::{Kind, Tensor};

use crate::data::{self, Examples, NewImages, Sample, SampleRequest, SampleSet, SampleWishes};
use crate::exit::{Exit, ensure_use, wrong_content, wrong_use};
use crate::files::{self, FlagFile};
use crate::output;
use crate::progress::Progress;
use crate::saved_weights::{LoadedModel, PIXELS, SavedWeights, Weights};
use crate::setting::{self, EvaluationPlace, IMAGE_MODELS, ModelName, NumberType, typed, words};

/// Number of samples in memory at once, if samples are loaded on demand.
const AT_ONCE: usize = 256;
/// Number of likeliest classes in a prediction.
const TOP: i64 = 5;
/// Number of runners-up in a line of text.
const SHOWN: usize = 2;

/// Options of `brimful predict`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  brimful train --save digits.safetensors
  brimful predict --weights digits.safetensors
  brimful predict --weights digits.safetensors --json | jq 'select(.class != .target)'
  brimful predict --weights flowers.safetensors --data photo.jpg other.png
  brimful predict --weights flowers.safetensors --data new-photos --json    a folder, with or without classes
  brimful predict --model resnet18 --weights resnet18.safetensors --data ~/fashion-mnist -o answers.jsonl

Of digits, synthetic and IDX files, the samples are those that train holds out for tests.")]
pub struct PredictOptions {
    /// Weights: a file of train --save, or any safetensors file
    ///
    /// In any other file, the tensors must have the names of the model's variables
    #[arg(long, value_name = "FILE")]
    weights: PathBuf,
    #[arg(long, value_name = "MODEL")]
    #[arg(help = "Model: mlp, resnet18, resnet50, … [default: stored in the file]")]
    #[arg(long_help = format!("{IMAGE_MODELS} [default: stored in the file]"))]
    model: Option<ModelName>,
    /// Data: digits, synthetic, image files or image folder
    ///
    /// Images are .jpg, .jpeg or .png files. A folder holds images, with or without one subfolder per class, or
    /// MNIST-format IDX files
    #[arg(long, default_value = "digits", value_name = "DATA", num_args = 1..)]
    data: Vec<String>,
    /// Image size in pixels [default: as trained, else 224]
    #[arg(long, value_name = "PIXELS", value_parser = words::count)]
    image: Option<usize>,
    #[command(flatten)]
    place: EvaluationPlace,
    #[arg(long, value_enum, help = format!("{} [default: stored in the file]", words::DTYPE))]
    dtype: Option<NumberType>,
    #[arg(long, value_name = "N", default_value_t = 0, help = words::SEED)]
    seed: u64,
    /// Print JSON instead of text: one line with one object per sample
    #[arg(long)]
    json: bool,
    /// Output file: JSON lines; only the accuracy is printed
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Overwrite files that an earlier run wrote
    #[arg(long)]
    overwrite: bool,
}

impl PredictOptions {
    /// Lists the given files, each with its flag.
    pub(crate) fn files(&self) -> Vec<FlagFile> {
        let output = files::written("--output", self.output.as_ref());
        let files = [
            output.map(|output| FlagFile { is_new: !self.overwrite, ..output }),
            files::read("--weights", Some(&self.weights)),
        ];
        let data = self.data.iter().filter_map(|data| files::read_data(data));
        files.into_iter().flatten().chain(data).collect()
    }
}

/// Prediction for one sample.
#[derive(Debug, PartialEq, Serialize)]
struct Prediction {
    /// Index of the sample, from 0.
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<String>,
    #[serde(flatten)]
    answer: Answer,
    /// The sample's true class, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<i64>,
    /// Likeliest classes, the answer first.
    top: Vec<Answer>,
    /// Name of the true class, for the text output. JSON has only the number of the true class.
    #[serde(skip)]
    right: Option<String>,
}

/// A class and its probability.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Answer {
    class: i64,
    probability: f64,
    /// Name of the class, if it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
}

/// Likeliest classes of a sample, the probabilities of these classes, and the sample's true class.
type Likeliest = ((Vec<i64>, Vec<f64>), i64);

/// Samples to predict.
#[derive(Debug)]
struct Asked {
    samples: SampleSet,
    sample: Sample,
    /// Paths of the samples, if each sample is a separate file.
    files: Vec<PathBuf>,
    class_names: Vec<String>,
}

/// Predicts every sample.
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
    let mut asked = Asked::open(options, &weights, name)?;
    let layers = name.layers(&asked.sample, 0.0);
    let layers = layers.map_err(|error| wrong_use(error.to_string()))?;
    let weights = Weights::File(weights, name);
    let loaded = weights
        .load(layers, &options.place, options.dtype, |layers, root| Ok(layers.build(root)?))?;
    let LoadedModel { model, kind, mut micro, memory } = loaded;
    let _inside = memory.enter();
    let samples = asked.samples.len();
    let at_once = asked.samples.at_once(AT_ONCE);
    let mut predictions = Vec::with_capacity(samples);
    let progress = Progress::new(samples, "samples");
    for places in split::by_size(samples, at_once)? {
        let request = SampleRequest::plain(places.clone());
        let Examples { inputs, targets, lacking, .. } = asked.samples.bring(&request)?;
        let likeliest = micro.map(&inputs, |x: Tensor| {
            let logits = model.forward_t(&typed(&x, kind), false);
            let most = TOP.min(*logits.size().last().unwrap_or(&1));
            logits.softmax(-1, Kind::Float).topk(most, -1, true, true)
        })?;
        let indices = places.clone().filter(|index| !lacking.contains(index));
        predictions.extend(asked.predictions(indices, likeliest, &targets)?);
        progress.advance(places.len());
    }
    Ok(predictions)
}

impl Asked {
    fn open(options: &PredictOptions, weights: &SavedWeights, name: ModelName) -> Result<Self> {
        let paths: Vec<PathBuf> = options.data.iter().map(PathBuf::from).collect();
        let is_files = match &paths[..] {
            [path] => data::are_images(path).map_err(wrong_content)?,
            _ => true,
        };
        if is_files {
            return Self::files(&paths, options, weights, name);
        }
        let pixels = weights.told(PIXELS).and_then(|text| text.parse().ok());
        let wishes = SampleWishes { image: options.image, sequence: None, pixels };
        let dataset = name.data(&options.data[0], wishes, options.seed)?;
        ensure_use!(
            matches!(dataset.sample, Sample::Image { .. }),
            "predict classifies images: for text use brimful generate"
        );
        let names = weights.class_names().unwrap_or_default();
        ensure_use!(
            names.is_empty(),
            "the model has the classes {}, but the data none with names: give a folder of images",
            names.join(", ")
        );
        let (samples, sample) = (dataset.test, dataset.sample);
        Ok(Self { samples, sample, files: Vec::new(), class_names: Vec::new() })
    }

    /// Opens image files, in the size of `--image`, or else in the size that the model was trained with.
    fn files(
        paths: &[PathBuf],
        options: &PredictOptions,
        weights: &SavedWeights,
        name: ModelName,
    ) -> Result<Self> {
        let told = weights.told("image").and_then(|pixels| pixels.parse().ok());
        if let (Some(asked), Some(told)) = (options.image, told) {
            ensure_use!(
                !name.stems_differ(asked, told),
                "--image {asked}: the model was trained with --image {told}, and below 64 pixels the first \
                 convolution of {name} is a different one: leave --image out"
            );
        }
        let opened = data::open_new(paths, options.image.or(told), weights.class_names());
        let opened = opened.map_err(wrong_content)?;
        let NewImages { samples, files, class_names, side } = opened;
        ensure_use!(!files.is_empty(), "{} has no images", options.data.join(", "));
        let classes = match class_names.len() {
            0 => weights.rows("fc.weight"),
            named => Some(named as i64),
        };
        let classes = classes.with_context(|| {
            let path = options.weights.display();
            wrong_use(format!(
                "{path} does not store its number of classes: give --data a folder with a subfolder for each class"
            ))
        })?;
        let sample = Sample::Image { shape: [3, side, side], classes };
        Ok(Self { samples, sample, files, class_names })
    }

    /// Makes the predictions for the samples at these indices, from the samples' likeliest classes and their
    /// probabilities.
    fn predictions(
        &self,
        indices: impl Iterator<Item = usize>,
        (probabilities, classes): (Tensor, Tensor),
        targets: &Tensor,
    ) -> Result<Vec<Prediction>> {
        setting::check_answers(&probabilities)?;
        let probabilities = Vec::<Vec<f64>>::try_from(probabilities.to_kind(Kind::Double))?;
        let classes = Vec::<Vec<i64>>::try_from(classes)?;
        let targets = Vec::<i64>::try_from(targets)?;
        let answers = classes.into_iter().zip(probabilities).zip(targets);
        let prediction = |(index, ((classes, probabilities), target)): (usize, Likeliest)| {
            let top = classes.into_iter().zip(probabilities);
            let answer =
                |(class, probability)| Answer { class, probability, name: self.name(class) };
            let top: Vec<Answer> = top.map(answer).collect();
            let file = self.files.get(index).map(|path: &PathBuf| path.display().to_string());
            let target = Some(target).filter(|target| *target >= 0);
            let right = target.and_then(|target| self.name(target));
            Prediction { index, file, answer: top[0].clone(), target, top, right }
        };
        Ok(indices.zip(answers).map(prediction).collect())
    }

    fn name(&self, class: i64) -> Option<String> {
        self.class_names.get(usize::try_from(class).ok()?).cloned()
    }
}

fn json_lines(predictions: &[Prediction]) -> Result<String> {
    predictions.iter().map(|one| Ok(serde_json::to_string(one)? + "\n")).collect()
}

fn summary(predictions: &[Prediction]) -> String {
    let known = predictions.iter().filter(|one| one.target.is_some()).count();
    if known == 0 {
        return output::numbered(predictions.len(), "image");
    }
    let right = predictions.iter().filter(|one| one.target == Some(one.answer.class)).count();
    let share = 100.0 * right as f64 / known as f64;
    format!("{right} of {known} are correct: {share:.1} %")
}

impl fmt::Display for Prediction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { index, file, answer, target, top, right } = self;
        match file {
            Some(file) => write!(f, "{file}")?,
            None => write!(f, "sample {index:>5}")?,
        }
        let Answer { class, probability, name } = answer;
        write!(f, "  class {class:>3}  {:5.1} %", probability * 100.0)?;
        name.iter().try_for_each(|name| write!(f, "  {name}"))?;
        match (target, right) {
            (Some(target), _) if target == class => Ok(()),
            (Some(target), Some(right)) => write!(f, "  wrong: it is {target}, {right}"),
            (Some(target), None) => write!(f, "  wrong: it is {target}"),
            (None, _) => top.iter().skip(1).take(SHOWN).try_for_each(|answer| {
                let Answer { class, probability, name } = answer;
                let class = name.clone().unwrap_or_else(|| class.to_string());
                write!(f, "  {class} {:.1} %", probability * 100.0)
            }),
        }
    }
}
