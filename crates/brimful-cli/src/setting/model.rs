//! Built-in models by name, and the samples that each model takes.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use anyhow::{Context, Result, bail, ensure};
use brimful::Layers;
use brimful_models::{AmoebaNet, Gpt, ResNet, UNet, gpt, mlp};
use serde::{Serialize, Serializer};

use super::NormStatistics;
use super::words::did_you_mean;
use crate::data::{self, Dataset, Sample, SampleWishes, Synthetic};
use crate::exit::{wrong_content, wrong_use};

macro_rules! image_names {
    () => {
        "mlp, resnet18, resnet50, resnet101"
    };
}

macro_rules! text_names {
    () => {
        "gpt (small: 4 blocks of width 128), gpt2, gpt2-medium, gpt2-large, gpt2-xl"
    };
}

macro_rules! amoebanet {
    () => {
        "amoebanet:LxF (L cells, F filters)"
    };
}

macro_rules! names {
    () => {
        concat!(
            image_names!(),
            ", ",
            text_names!(),
            ", unet:BxC (B blocks per cell, C channels), ",
            amoebanet!()
        )
    };
}

/// Help text of `--model` for built-in models.
pub(crate) const MODEL: &str = "Model: mlp, resnet50, gpt, … (--help lists all)";

/// Long help text of `--model` for built-in models.
pub const MODELS: &str = concat!("Model: ", names!());

/// Help text of `--model` for built-in models and folders.
pub(crate) const ANY_MODEL: &str = "Model: mlp, resnet50, gpt, … or a Hugging Face folder";

/// Long help text of `--model` for built-in models and folders.
pub(crate) const ANY_MODELS: &str =
    concat!("Model: ", names!(), "; or a Hugging Face folder of a gpt2, llama, mistral or qwen2");

/// Long help text of `--model` for images only.
pub(crate) const IMAGE_MODELS: &str = concat!("Model: ", image_names!(), ", ", amoebanet!());

/// Long help text of `--model` for text only.
pub(crate) const TEXT_MODELS: &str = concat!(
    "Model: ",
    text_names!(),
    "; or a Hugging Face folder of a gpt2, llama, mistral or qwen2"
);

/// Dropout probability of the models with dropout.
pub(crate) const DROPOUT: f64 = 0.1;
/// Default number of tokens in a sequence.
pub(crate) const SEQUENCE: i64 = 64;
/// Height in pixels below which residual networks get a first convolution for small images.
const SMALL: usize = 64;
/// Vocabulary of GPT-2.
const VOCABULARY: i64 = 50_257;

/// A built-in model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelName {
    Mlp,
    Resnet18,
    Resnet50,
    Resnet101,
    Gpt,
    Gpt2,
    Gpt2Medium,
    Gpt2Large,
    Gpt2Xl,
    UNet { blocks: usize, channels: i64 },
    AmoebaNet { cells: usize, filters: i64 },
}

/// Models named by one word.
const WORDS: [(&str, ModelName); 9] = [
    ("mlp", ModelName::Mlp),
    ("resnet18", ModelName::Resnet18),
    ("resnet50", ModelName::Resnet50),
    ("resnet101", ModelName::Resnet101),
    ("gpt", ModelName::Gpt),
    ("gpt2", ModelName::Gpt2),
    ("gpt2-medium", ModelName::Gpt2Medium),
    ("gpt2-large", ModelName::Gpt2Large),
    ("gpt2-xl", ModelName::Gpt2Xl),
];

/// A family of models named by a word and two numbers.
struct SizedFamily {
    family: &'static str,
    numbers: &'static str,
    example: &'static str,
    model: fn(usize, i64) -> ModelName,
}

const SIZED: [SizedFamily; 2] = [
    SizedFamily {
        family: "unet",
        numbers: "unet:BxC (B blocks per cell, C channels)",
        example: "unet:5x64",
        model: |blocks, channels| ModelName::UNet { blocks, channels },
    },
    SizedFamily {
        family: "amoebanet",
        numbers: "amoebanet:LxF (L cells, F filters)",
        example: "amoebanet:18x256",
        model: |cells, filters| ModelName::AmoebaNet { cells, filters },
    },
];

impl SizedFamily {
    /// Returns the error text that says which numbers are expected.
    fn wanted(&self) -> String {
        let Self { numbers, example, .. } = self;
        format!(
            "give two numbers after the colon: {numbers}, as in {example}, with --data synthetic"
        )
    }
}

impl ModelName {
    /// Returns the model's layers for samples of this shape.
    pub fn layers(self, sample: &Sample, dropout: f64) -> Result<Layers> {
        match sample {
            Sample::Image { shape, classes } => self.for_images(shape, *classes),
            Sample::Mask { shape: [in_channels, _, _] } => match self {
                Self::UNet { blocks, channels } => {
                    let network = UNet::new(blocks, channels);
                    Ok(UNet { in_channels: *in_channels, dropout, ..network }.layers()?)
                }
                _ => Err(self.other_data()),
            },
            Sample::Sequence { length, vocabulary } => {
                Ok(gpt(&self.text_shape(*length, *vocabulary, dropout)?))
            }
        }
    }

    /// Returns the model's layers. BatchNorms use the given kind of statistics, or else the default.
    pub fn layers_normed(
        self,
        sample: &Sample,
        dropout: f64,
        statistics: Option<NormStatistics>,
    ) -> Result<Layers> {
        let Some(statistics) = statistics else { return self.layers(sample, dropout) };
        let policy = statistics.policy();
        match (self, sample) {
            (Self::AmoebaNet { cells, filters }, Sample::Image { shape: [3, ..], classes }) => {
                Ok(AmoebaNet::new(cells, filters, *classes).batch_norm(policy).layers()?)
            }
            _ => match self.residual_shape(sample) {
                Some(network) => Ok(network.batch_norm(policy).layers()),
                None => Err(wrong_use(format!(
                    "--batch-norm is for resnet18, resnet50, resnet101 and amoebanet:LxF, on images, and \
                     the model is {self}: leave it out"
                ))),
            },
        }
    }

    /// Returns whether images of these sides need different first convolutions.
    pub(crate) fn stems_differ(self, one: usize, other: usize) -> bool {
        let is_residual = matches!(self, Self::Resnet18 | Self::Resnet50 | Self::Resnet101);
        is_residual && (one < SMALL) != (other < SMALL)
    }

    /// Returns the residual network for these samples, if the model is one.
    fn residual_shape(self, sample: &Sample) -> Option<ResNet> {
        let Sample::Image { shape, classes } = sample else { return None };
        let network = match self {
            Self::Resnet18 => ResNet::resnet18(*classes),
            Self::Resnet50 => ResNet::resnet50(*classes),
            Self::Resnet101 => ResNet::resnet101(*classes),
            _ => return None,
        };
        let [channels, height, _] = *shape;
        // The first convolution for small images keeps their height and width.
        Some(match height < SMALL as i64 {
            true => network.small_images(channels),
            false => ResNet { in_channels: channels, ..network },
        })
    }

    fn for_images(self, shape: &[i64; 3], classes: i64) -> Result<Layers> {
        if let Some(network) = self.residual_shape(&Sample::Image { shape: *shape, classes }) {
            return Ok(network.layers());
        }
        Ok(match self {
            Self::Mlp => mlp(shape.iter().product(), &[512, 256], classes),
            Self::AmoebaNet { cells, filters } => {
                let channels = shape[0];
                ensure!(channels == 3, self.other_data());
                AmoebaNet::new(cells, filters, classes).layers()?
            }
            _ => return Err(self.other_data()),
        })
    }

    /// Returns the shape of a GPT for sequences of up to `context` tokens from a vocabulary of this size.
    pub(crate) fn text_shape(self, context: i64, vocabulary: i64, dropout: f64) -> Result<Gpt> {
        let network = match self {
            Self::Gpt => Gpt { layers: 4, width: 128, heads: 4, ..Gpt::gpt2_small() },
            Self::Gpt2 => Gpt::gpt2_small(),
            Self::Gpt2Medium => Gpt::gpt2_medium(),
            Self::Gpt2Large => Gpt::gpt2_large(),
            Self::Gpt2Xl => Gpt::gpt2_xl(),
            _ => return Err(self.other_data()),
        };
        Ok(Gpt { context, vocabulary, dropout, ..network })
    }

    /// Returns the error for data that the model does not take. The error names all data that the model takes, so
    /// that the next attempt is not refused too.
    fn other_data(self) -> anyhow::Error {
        wrong_use(match self {
            Self::Mlp | Self::Resnet18 | Self::Resnet50 | Self::Resnet101 => format!(
                "{self} needs images: give --data digits, synthetic, or a folder of images or of IDX files"
            ),
            Self::AmoebaNet { .. } => {
                "an amoebanet needs colour images: give --data synthetic, or a folder of images"
                    .into()
            }
            Self::UNet { .. } => {
                "a unet needs images with masks, which --data synthetic alone has".into()
            }
            _ => "a gpt needs text: give --data a text file, or synthetic".into(),
        })
    }

    /// Opens the data with this name or at this path. Synthetic data has the shape that the model takes.
    pub(crate) fn data(self, name: &str, wishes: SampleWishes, seed: u64) -> Result<Dataset> {
        let sequence = wishes.sequence.map(|tokens| tokens as i64);
        match name {
            "digits" => data::digits(wishes.pixels),
            "synthetic" => {
                let mut sample = self.synthetic_sample();
                if let (Sample::Sequence { length, .. }, Some(tokens)) = (&mut sample, sequence) {
                    *length = tokens;
                }
                data::synthetic(&Synthetic::usual(sample, seed))
            }
            path => data::open(Path::new(path), sequence.unwrap_or(SEQUENCE), wishes)
                .map_err(wrong_content),
        }
    }

    pub fn synthetic_sample(self) -> Sample {
        match self {
            Self::Mlp => Sample::Image { shape: [1, 8, 8], classes: 10 },
            Self::Resnet18 => Sample::Image { shape: [3, 32, 32], classes: 10 },
            Self::Resnet50 | Self::Resnet101 | Self::AmoebaNet { .. } => {
                Sample::Image { shape: [3, 64, 64], classes: 10 }
            }
            Self::UNet { .. } => Sample::Mask { shape: [3, 64, 64] },
            Self::Gpt => Sample::Sequence { length: SEQUENCE, vocabulary: 256 },
            Self::Gpt2 | Self::Gpt2Medium | Self::Gpt2Large | Self::Gpt2Xl => {
                Sample::Sequence { length: SEQUENCE, vocabulary: VOCABULARY }
            }
        }
    }
}

impl FromStr for ModelName {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        if let Some((_, name)) = WORDS.iter().find(|(word, _)| *word == text) {
            return Ok(*name);
        }
        if let Some(sized) = SIZED.iter().find(|sized| sized.family == text) {
            bail!("{}", sized.wanted());
        }
        let Some((family, numbers)) = text.split_once(':') else {
            let slip = did_you_mean(text, WORDS.iter().map(|(word, _)| *word));
            bail!("there is no such model: give one of {}{slip}", names!());
        };
        let Some(sized) = SIZED.iter().find(|sized| sized.family == family) else {
            bail!("only unet and amoebanet take numbers");
        };
        let pair = || {
            let (first, second) = numbers.split_once('x')?;
            Some((first.parse::<u16>().ok()?, second.parse::<u16>().ok()?))
        };
        let (first, second) = pair().with_context(|| sized.wanted())?;
        let model = (sized.model)(first.into(), second.into());
        // Checks the two numbers now, by making the layers for synthetic samples.
        model.layers(&model.synthetic_sample(), DROPOUT)?;
        Ok(model)
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UNet { blocks, channels } => write!(f, "unet:{blocks}x{channels}"),
            Self::AmoebaNet { cells, filters } => write!(f, "amoebanet:{cells}x{filters}"),
            _ => {
                let named = WORDS.iter().find(|(_, name)| name == self);
                f.write_str(named.map_or("?", |(word, _)| word))
            }
        }
    }
}

impl Serialize for ModelName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        let words = WORDS.iter().map(|(word, _)| *word);
        for text in words.chain(["unet:5x64", "amoebanet:18x256"]) {
            assert_eq!(text.parse::<ModelName>().expect("a model").to_string(), text);
        }
    }

    #[test]
    fn names_that_nobody_has_are_refused_with_those_that_there_are() {
        for (text, words) in [
            ("alexnet", "give one of mlp, resnet18"),
            ("resnet81", "did you mean 'resnet18'?"),
            (
                "unet",
                "unet:BxC (B blocks per cell, C channels), as in unet:5x64, with --data synthetic",
            ),
            ("amoebanet", "as in amoebanet:18x256, with --data synthetic"),
            ("amoebanet:axb", "amoebanet:LxF (L cells, F filters), as in amoebanet:18x256"),
            ("unet:1x4", "give it 2 or more"),
            ("unet:2x5", "give an even number"),
            ("amoebanet:4x8", "give an AmoebaNet 3, 6, 9, …"),
            ("unet:5", "as in unet:5x64"),
            ("unet:5x-64", "as in unet:5x64"),
            ("mlp:5x64", "only unet and amoebanet"),
        ] {
            let error = text.parse::<ModelName>().expect_err(text).to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn every_model_takes_the_samples_that_are_made_up_for_it() {
        let unet = ModelName::UNet { blocks: 2, channels: 4 };
        let amoebanet = ModelName::AmoebaNet { cells: 3, filters: 8 };
        for model in WORDS.iter().map(|(_, name)| *name).chain([unet, amoebanet]) {
            let layers = model.layers(&model.synthetic_sample(), DROPOUT);
            assert!(layers.is_ok(), "{model}: {layers:?}");
        }
        let error = unet.layers(&amoebanet.synthetic_sample(), DROPOUT).expect_err("no masks");
        assert!(error.to_string().starts_with("a unet needs images with masks"), "{error}");
    }
}
