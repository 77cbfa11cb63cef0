//! What several commands are told in the same words: model, data, device, number type.

use std::path::Path;

use anyhow::{Result, bail};
use brimful::Layers;
use brimful_models::{Gpt, ResNet, gpt, mlp};
use brimful_torch::autograd;
use clap::ValueEnum;
use serde::Serialize;
use tch::nn::VarStore;
use tch::{Kind, Reduction, Tensor};

use crate::data::{self, Dataset, Sample, Synthetic};

/// Tokens in a sequence.
const SEQUENCE: i64 = 64;

/// A model that the program knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ModelName {
    /// A multi-layer perceptron with hidden layers of 512 and 256
    Mlp,
    /// A residual network of 18 layers
    Resnet18,
    /// A residual network of 50 layers
    Resnet50,
    /// A small GPT: 4 blocks of width 128
    Gpt,
}

/// The type of the model's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum NumberType {
    F64,
    F32,
    Bf16,
}

impl NumberType {
    pub(crate) fn kind(self) -> Kind {
        match self {
            Self::F64 => Kind::Double,
            Self::F32 => Kind::Float,
            Self::Bf16 => Kind::BFloat16,
        }
    }
}

impl ModelName {
    /// The model for samples of this shape.
    pub(crate) fn layers(self, sample: &Sample) -> Result<Layers> {
        Ok(match (self, sample) {
            (Self::Mlp, Sample::Image { shape, classes }) => {
                mlp(shape.iter().product(), &[512, 256], *classes)
            }
            (Self::Resnet18, Sample::Image { shape, classes }) => {
                residual(ResNet::resnet18(*classes), shape)
            }
            (Self::Resnet50, Sample::Image { shape, classes }) => {
                residual(ResNet::resnet50(*classes), shape)
            }
            (Self::Gpt, Sample::Sequence { length, vocabulary }) => gpt(&Gpt {
                layers: 4,
                width: 128,
                heads: 4,
                context: *length,
                vocabulary: *vocabulary,
                dropout: 0.1,
                tied: true,
            }),
            (Self::Gpt, _) => bail!("a gpt needs text: give --data a text file, or synthetic"),
            _ => bail!(
                "this model needs images: give --data digits, synthetic or a folder of IDX files"
            ),
        })
    }

    /// The data of this name or at this path; made up, it is what the model takes.
    pub(crate) fn data(self, name: &str, seed: u64) -> Result<Dataset> {
        match name {
            "digits" => data::digits(),
            "synthetic" => data::synthetic(&Synthetic {
                sample: self.synthetic_sample(),
                train: 512,
                test: 128,
                seed,
            }),
            path => data::open(Path::new(path), SEQUENCE),
        }
    }

    pub(crate) fn synthetic_sample(self) -> Sample {
        match self {
            Self::Mlp => Sample::Image { shape: [1, 8, 8], classes: 10 },
            Self::Resnet18 => Sample::Image { shape: [3, 32, 32], classes: 10 },
            Self::Resnet50 => Sample::Image { shape: [3, 64, 64], classes: 10 },
            Self::Gpt => Sample::Sequence { length: SEQUENCE, vocabulary: 256 },
        }
    }
}

/// A residual network for images of this shape: small ones keep their size at the stem.
fn residual(network: ResNet, &[channels, height, _]: &[i64; 3]) -> Layers {
    let network = if height < 64 {
        network.small_images(channels)
    } else {
        ResNet { in_channels: channels, ..network }
    };
    network.layers()
}

/// The mean cross-entropy of logits, whose last dimension is the classes.
pub(crate) fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Tensor {
    let classes = logits.size().last().copied().unwrap_or(1);
    logits.reshape([-1, classes]).cross_entropy_loss::<Tensor>(
        &targets.reshape([-1]),
        None,
        Reduction::Mean,
        -100,
        0.0,
    )
}

/// Leaves every parameter without a gradient.
pub(crate) fn clear_gradients(store: &VarStore) -> Result<()> {
    let mut parameters = store.trainable_variables();
    Ok(parameters.iter_mut().try_for_each(|p| autograd::set_gradient(p, None))?)
}

/// The inputs in the model's number type; token numbers stay what they are.
pub(crate) fn typed(inputs: &Tensor, kind: Kind) -> Tensor {
    if inputs.is_floating_point() { inputs.to_kind(kind) } else { inputs.shallow_clone() }
}
