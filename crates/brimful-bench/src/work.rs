//! Work of a row: a model, its dtype, its samples, and its micro-batches.

use std::str::FromStr;

use anyhow::{Context, Result, bail, ensure};
use brimful::Layers;
use brimful_cli::data::Sample;
use brimful_cli::setting::{LossModel, ModelName, NormStatistics, NumberType};
use brimful_models::{Gpt, Llama, LlamaBiases, ResNet, RotaryScaling, gpt, llama, mlp};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

const CLASSES: i64 = 1000;
/// GPT-2's 50,257 tokens, padded as usual to a size that suits fast kernels.
const VOCABULARY: i64 = 50_304;
const HEAD_WIDTH: i64 = 64;

/// Shape of a GPT or a Llama, written `12x768x512`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GptShape {
    pub(crate) layers: usize,
    pub(crate) width: i64,
    pub(crate) sequence: i64,
    /// True for a Llama.
    pub(crate) llama: bool,
}

/// Work of one row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Workload {
    pub(crate) model: ModelName,
    pub(crate) dtype: NumberType,
    pub(crate) batch: usize,
    pub(crate) micro_batch: usize,
    pub(crate) image: i64,
    pub(crate) gpt: GptShape,
    /// Vocabulary of a GPT. Its head shares the embedding's table if `tied`.
    pub(crate) vocabulary: i64,
    pub(crate) tied: bool,
    /// Statistics that BatchNorms normalise by.
    pub(crate) norms: NormStatistics,
}

/// Samples and their targets.
pub(crate) type Samples = (Tensor, Tensor);

/// Returns the rows that the peers are measured on; on a CPU, smaller ones that take seconds.
pub(crate) fn table(device: Device) -> Vec<Workload> {
    use ModelName::{Gpt, Resnet50, Resnet101};
    use NumberType::{Bf16, F32, Tf32};
    let rows = if device == Device::Cpu {
        [(Resnet50, F32, 16, 4), (Resnet101, F32, 8, 2), (Resnet50, Bf16, 8, 2), (Gpt, Bf16, 8, 2)]
    } else {
        [
            (Resnet50, Tf32, 512, 64),
            (Resnet101, Tf32, 256, 32),
            (Resnet50, Bf16, 512, 16),
            (Gpt, Bf16, 128, 8),
        ]
    };
    let row = |(model, dtype, batch, micro_batch)| Workload {
        dtype,
        batch,
        micro_batch,
        ..Workload::default_of(model, device)
    };
    rows.map(row).into()
}

impl Workload {
    /// Returns the default work for a model.
    pub(crate) fn default_of(model: ModelName, device: Device) -> Self {
        let cuda = device != Device::Cpu;
        let (batch, micro_batch) = match (model, cuda) {
            (ModelName::Mlp, _) => (1024, 128),
            (ModelName::Gpt, true) => (128, 8),
            (ModelName::Gpt, false) => (8, 2),
            (ModelName::Resnet101, true) => (256, 32),
            (_, true) => (512, 64),
            (_, false) => (16, 4),
        };
        let gpt = if cuda {
            GptShape { layers: 12, width: 768, sequence: 512, llama: false }
        } else {
            GptShape { layers: 2, width: 128, sequence: 64, llama: false }
        };
        let dtype = if cuda { NumberType::Tf32 } else { NumberType::F32 };
        let image = if cuda { 224 } else { 64 };
        let (vocabulary, tied, norms) = (VOCABULARY, true, NormStatistics::Deferred);
        Self { model, dtype, batch, micro_batch, image, gpt, vocabulary, tied, norms }
    }

    /// Returns the default work with byte tokens for a GPT, and an untied head: a larger vocabulary would make
    /// the head the one large stage.
    pub(crate) fn of_bytes(model: ModelName, device: Device) -> Self {
        Self { vocabulary: 256, tied: false, ..Self::default_of(model, device) }
    }

    /// Builds the model in a store, with its dtype.
    pub(crate) fn build(&self, store: &VarStore) -> Result<LossModel> {
        Ok(LossModel::build(&self.layers()?.kind(self.dtype.kind()), &store.root())?)
    }

    /// Returns the model, without dropout: contestants must agree on the loss.
    pub(crate) fn layers(&self) -> Result<Layers> {
        match self.model {
            ModelName::Gpt if self.gpt.llama => {
                Ok(llama(&self.gpt.llama_config(self.vocabulary, self.tied)))
            }
            ModelName::Gpt => Ok(gpt(&self.gpt.config(self.vocabulary, self.tied))),
            ModelName::Mlp => Ok(mlp(28 * 28, &[1024, 1024], CLASSES)),
            // torchvision's models, however small the image: the peers run those.
            ModelName::Resnet18 => Ok(self.normed(ResNet::resnet18(CLASSES))),
            ModelName::Resnet50 => Ok(self.normed(ResNet::resnet50(CLASSES))),
            ModelName::Resnet101 => Ok(self.normed(ResNet::resnet101(CLASSES))),
            model if self.norms == NormStatistics::Deferred => model.layers(&self.sample(), 0.0),
            model => model.layers_normed(&self.sample(), 0.0, Some(self.norms)),
        }
    }

    fn normed(&self, network: ResNet) -> Layers {
        network.batch_norm(self.norms.policy()).layers()
    }

    /// Returns the model's input, at the size of this work.
    fn sample(&self) -> Sample {
        let (image, classes) = ([3, self.image, self.image], CLASSES);
        match self.model.synthetic_sample() {
            Sample::Sequence { .. } => {
                Sample::Sequence { length: self.gpt.sequence, vocabulary: self.vocabulary }
            }
            Sample::Mask { .. } => Sample::Mask { shape: image },
            Sample::Image { .. } if self.model == ModelName::Mlp => {
                Sample::Image { shape: [1, 28, 28], classes }
            }
            Sample::Image { .. } => Sample::Image { shape: image, classes },
        }
    }

    /// Returns random samples in host memory; never zeros, on which some kernels are faster.
    pub(crate) fn samples(&self, count: usize) -> Samples {
        let count = count as i64;
        let on_host = |kind| (kind, Device::Cpu);
        let noise = |[channels, height, width]: [i64; 3]| {
            Tensor::randn([count, channels, height, width], on_host(Kind::Float))
        };
        match self.sample() {
            Sample::Sequence { length, vocabulary } => {
                let tokens = || Tensor::randint(vocabulary, [count, length], on_host(Kind::Int64));
                (tokens(), tokens())
            }
            Sample::Image { shape, classes } => {
                let classes = Tensor::randint(classes, [count], on_host(Kind::Int64));
                (noise(shape).to_kind(self.dtype.kind()), classes)
            }
            Sample::Mask { shape: [channels, height, width] } => {
                let marked = noise([1, height, width]).gt(0.0).to_kind(Kind::Float);
                (noise([channels, height, width]).to_kind(self.dtype.kind()), marked)
            }
        }
    }

    /// Returns whether its samples are images, and its layers convolutions.
    pub(crate) fn is_image(&self) -> bool {
        !matches!(self.model, ModelName::Mlp | ModelName::Gpt)
    }

    /// Returns the sample's size for a table: `224×224`, `12×768×512`.
    pub(crate) fn shape(&self) -> String {
        match (self.model, self.sample()) {
            (ModelName::Gpt, _) => {
                let GptShape { layers, width, sequence, .. } = self.gpt;
                format!("{layers}×{width}×{sequence}")
            }
            (_, Sample::Sequence { length, .. }) => length.to_string(),
            (_, Sample::Image { shape, .. } | Sample::Mask { shape }) => {
                format!("{}×{}", shape[1], shape[2])
            }
        }
    }

    /// Returns the model's name, as the peers' scripts use it.
    pub(crate) fn name(&self) -> String {
        if self.gpt.llama { "llama".to_owned() } else { self.model.to_string() }
    }

    /// Returns the row's title while it runs.
    pub(crate) fn title(&self) -> String {
        let Self { batch, micro_batch, .. } = self;
        format!("{} {} {batch}/{micro_batch}", self.name(), self.dtype)
    }
}

impl GptShape {
    fn config(self, vocabulary: i64, tied: bool) -> Gpt {
        let Self { layers, width, sequence, .. } = self;
        let heads = width / HEAD_WIDTH;
        Gpt { layers, width, heads, context: sequence, vocabulary, dropout: 0.0, tied }
    }

    /// Describes a Llama with feed-forward layers of 11/4 its width. These have about as many parameters as a GPT's
    /// of 4 times its width.
    fn llama_config(self, vocabulary: i64, tied: bool) -> Llama {
        let Self { layers, width, sequence, .. } = self;
        let heads = width / HEAD_WIDTH;
        Llama {
            layers,
            width,
            inner: width * 11 / 4,
            heads,
            key_value_heads: heads,
            head_width: HEAD_WIDTH,
            context: sequence,
            vocabulary,
            eps: 1e-5,
            rotary_base: 10_000.0,
            rotary_scaling: RotaryScaling::Unscaled,
            biases: LlamaBiases::default(),
            tied,
            dropout: 0.0,
            spread: 0.02,
        }
    }
}

impl FromStr for GptShape {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let numbers = text.split('x').map(str::parse::<u32>).collect::<Result<Vec<_>, _>>();
        let Ok([layers, width, sequence]) = numbers.as_deref() else {
            bail!("'{text}' is not layers x width x sequence, such as 12x768x512");
        };
        ensure!(
            *layers > 0 && *width > 0 && *sequence > 0 && i64::from(*width) % HEAD_WIDTH == 0,
            "'{text}': give at least one layer and token, and a width that is a multiple of 64"
        );
        let layers = usize::try_from(*layers).context("too many layers")?;
        let [width, sequence] = [*width, *sequence].map(i64::from);
        Ok(Self { layers, width, sequence, llama: false })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_is_three_numbers_and_whole_heads() {
        let shape = GptShape { layers: 12, width: 768, sequence: 512, llama: false };
        assert_eq!("12x768x512".parse::<GptShape>().expect("a shape"), shape);
        for text in ["12x768", "12x768xlong", "0x768x512", "2x100x8", ""] {
            assert!(text.parse::<GptShape>().is_err(), "{text}");
        }
    }

    #[test]
    fn the_gpt_of_the_table_has_the_peers_parameters() {
        let work = Workload::default_of(ModelName::Gpt, Device::Cuda(0));
        assert_eq!(
            work.layers().expect("a model").parameter_count().expect("a count"),
            124_082_688
        );
        assert_eq!(table(Device::Cuda(0)).len(), 4);
        let llama = Workload { gpt: GptShape { llama: true, ..work.gpt }, ..work };
        assert_eq!(
            llama.layers().expect("a model").parameter_count().expect("a count"),
            125_356_800
        );
    }
}
