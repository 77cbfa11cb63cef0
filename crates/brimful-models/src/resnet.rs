//! Residual networks for images, with torchvision's names and shapes, so that its weights load.
//!
//! "Deep Residual Learning for Image Recognition", He et al., 2015; a bottleneck's stride is at its
//! 3×3 convolution, as in torchvision. Each residual block is one layer.

use brimful::Layers;
use brimful::nn::{BatchNorm, second_use};
use tch::Tensor;
use tch::nn::{self, Module, ModuleT, Path};

use crate::conv::conv;
use crate::mlp::linear;
use crate::norm::batch_norm2d;

/// How an image enters the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Stem {
    /// A 7×7 convolution and a pooling, each of stride 2: for photographs, 224×224 and about.
    #[default]
    Large,
    /// A 3×3 convolution of stride 1: for images of 8×8 to 64×64, which the other would consume.
    Small,
}

/// The shape of a residual network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResNet {
    /// How many residual blocks each of the four groups has.
    pub blocks: [usize; 4],
    /// Whether a block is three convolutions with a narrow one in the middle, or two.
    pub bottleneck: bool,
    /// How many channels an image has.
    pub in_channels: i64,
    /// How many logits come out.
    pub classes: i64,
    /// How an image enters.
    pub stem: Stem,
}

/// ResNet-18, for 224×224 images of three channels.
pub fn resnet18(classes: i64) -> Layers {
    ResNet::resnet18(classes).layers()
}

/// ResNet-50, for 224×224 images of three channels.
pub fn resnet50(classes: i64) -> Layers {
    ResNet::resnet50(classes).layers()
}

/// ResNet-101, for 224×224 images of three channels.
pub fn resnet101(classes: i64) -> Layers {
    ResNet::resnet101(classes).layers()
}

impl ResNet {
    /// The shape of ResNet-18.
    pub fn resnet18(classes: i64) -> Self {
        Self::new([2, 2, 2, 2], false, classes)
    }

    /// The shape of ResNet-50.
    pub fn resnet50(classes: i64) -> Self {
        Self::new([3, 4, 6, 3], true, classes)
    }

    /// The shape of ResNet-101.
    pub fn resnet101(classes: i64) -> Self {
        Self::new([3, 4, 23, 3], true, classes)
    }

    fn new(blocks: [usize; 4], bottleneck: bool, classes: i64) -> Self {
        Self { blocks, bottleneck, in_channels: 3, classes, stem: Stem::default() }
    }

    /// The same for small images with this many channels: handwritten digits have one.
    #[must_use]
    pub fn small_images(self, in_channels: i64) -> Self {
        Self { in_channels, stem: Stem::Small, ..self }
    }

    /// The network as a list: `conv1`, `bn1` (with its ReLU, and a large stem's pooling), the blocks
    /// `layer1.0` to `layer4.…`, `avgpool`, `flatten`, `fc`.
    pub fn layers(&self) -> Layers {
        let features = 512 * self.expansion();
        let classes = self.classes;
        (0..4)
            .fold(self.stem_layers(), |layers, group| {
                layers.add_layers(format!("layer{}", group + 1), self.group(group))
            })
            .add_fn("avgpool", |x| x.adaptive_avg_pool2d([1, 1]))
            .add_fn("flatten", |x| x.flatten(1, -1))
            .add("fc", move |p| linear(p, features, classes))
    }

    fn stem_layers(&self) -> Layers {
        let (channels, large) = (self.in_channels, self.stem == Stem::Large);
        let (kernel, stride) = if large { (7, 2) } else { (3, 1) };
        let layers = Layers::new().add("conv1", move |p| conv(p, channels, 64, kernel, stride));
        match large {
            true => layers.add("bn1", |p| NormPool(batch_norm2d(p, 64))),
            false => layers.add("bn1", |p| batch_norm2d(p, 64).with_relu()),
        }
    }

    /// One of the four groups: its first block changes the size, the others keep it.
    fn group(&self, group: usize) -> Layers {
        let width = 64 << group;
        let out = width * self.expansion();
        let before = if group == 0 { 64 } else { out / 2 };
        let bottleneck = self.bottleneck;
        (0..self.blocks[group]).fold(Layers::new(), |layers, number| {
            let stride = if group > 0 && number == 0 { 2 } else { 1 };
            let channels = if number == 0 { before } else { out };
            let shape = ResidualShape { channels, width, out, stride };
            layers.add(number.to_string(), move |p| match bottleneck {
                true => ResidualBlock::bottleneck(p, shape),
                false => ResidualBlock::basic(p, shape),
            })
        })
    }

    /// How many times wider a block's output is than its middle.
    fn expansion(&self) -> i64 {
        if self.bottleneck { 4 } else { 1 }
    }
}

/// The numbers of channels at a block's entry, in its middle and at its exit, and its stride.
#[derive(Clone, Copy)]
struct ResidualShape {
    channels: i64,
    width: i64,
    out: i64,
    stride: i64,
}

/// A residual block: convolutions beside a shortcut.
#[derive(Debug)]
struct ResidualBlock {
    convolutions: Vec<(nn::Conv2D, BatchNorm)>,
    /// A 1×1 convolution where the entry and the exit differ in shape.
    downsample: Option<(nn::Conv2D, BatchNorm)>,
}

impl ResidualBlock {
    fn basic(path: &Path, ResidualShape { channels, out, stride, width }: ResidualShape) -> Self {
        let convolutions = [(channels, width, 3, stride), (width, out, 3, 1)];
        Self::new(path, &convolutions, stride)
    }

    fn bottleneck(
        path: &Path,
        ResidualShape { channels, out, stride, width }: ResidualShape,
    ) -> Self {
        let convolutions = [(channels, width, 1, 1), (width, width, 3, stride), (width, out, 1, 1)];
        Self::new(path, &convolutions, stride)
    }

    /// Each convolution as (channels in, channels out, kernel, stride).
    fn new(path: &Path, convolutions: &[(i64, i64, i64, i64)], stride: i64) -> Self {
        let channels = convolutions[0].0;
        let out = convolutions[convolutions.len() - 1].1;
        let convolutions = convolutions.iter().zip(1..).map(|(&(from, to, kernel, stride), n)| {
            let conv = conv(&(path / format!("conv{n}")), from, to, kernel, stride);
            (conv, batch_norm2d(&(path / format!("bn{n}")), to))
        });
        let convolutions = convolutions.collect();
        let downsample = (stride != 1 || channels != out).then(|| {
            let path = path / "downsample";
            (conv(&(&path / 0), channels, out, 1, stride), batch_norm2d(&(&path / 1), out))
        });
        Self { convolutions, downsample }
    }
}

impl ModuleT for ResidualBlock {
    fn forward_t(&self, x: &Tensor, train: bool) -> Tensor {
        let shortcut = second_use(x);
        let (last, first) = self.convolutions.split_last().expect("a block has convolutions");
        let inner = first
            .iter()
            .fold(x.shallow_clone(), |x, (conv, norm)| norm.forward_relu(&conv.forward(&x), train));
        let (conv, norm) = last;
        let out = conv.forward(&inner);
        match &self.downsample {
            Some((conv, other)) => {
                norm.forward_join_relu(&out, other, &conv.forward(&shortcut), train)
            }
            None => norm.forward_add_relu(&out, &shortcut, train),
        }
    }
}

/// A normalisation, a ReLU and a pooling of stride 2.
#[derive(Debug)]
struct NormPool(BatchNorm);

impl ModuleT for NormPool {
    fn forward_t(&self, x: &Tensor, train: bool) -> Tensor {
        self.0.forward_relu_pool(x, train)
    }
}
