//! Residual networks for images, with torchvision's names and shapes, so that its weights load.
//!
//! "Deep Residual Learning for Image Recognition", He et al., 2015; a bottleneck's stride is at its
//! 3×3 convolution, as in torchvision. Each residual block is one layer; with exact BatchNorms each of its
//! convolutions and BatchNorms is, because all micro-batches meet before each of these. The variables have
//! the same names.

use brimful::Layers;
use brimful::nn::{BatchNorm, BatchNormPolicy, second_use};
use tch::Tensor;
use tch::nn::{self, Module, ModuleT, Path};

use crate::conv::{ConvShape, conv};
use crate::mlp::linear;
use crate::norm::batch_norm2d;
use crate::stem::StemConv;

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
    /// What a micro-batch does to the BatchNorms' statistics, and what normalises it.
    pub batch_norm: BatchNormPolicy,
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
        let batch_norm = BatchNormPolicy::default();
        Self { blocks, bottleneck, in_channels: 3, classes, stem: Stem::default(), batch_norm }
    }

    /// The same for small images with this many channels: handwritten digits have one.
    #[must_use]
    pub fn small_images(self, in_channels: i64) -> Self {
        Self { in_channels, stem: Stem::Small, ..self }
    }

    /// The same with this policy of its BatchNorms.
    #[must_use]
    pub fn batch_norm(self, policy: BatchNormPolicy) -> Self {
        Self { batch_norm: policy, ..self }
    }

    /// The network as a list: `conv1`, `bn1` (with its ReLU, and a large stem's pooling), the blocks
    /// `layer1.0` to `layer4.…`, `avgpool`, `flatten`, `fc`. With exact BatchNorms, a block's layers are
    /// `layer1.0.conv1`, `layer1.0.bn1` and on.
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
        let policy = self.batch_norm;
        match large {
            true => Layers::new()
                .add("conv1", move |p| StemConv::new(p, channels, 64))
                .add_norm("bn1", move |p| NormPool(batch_norm2d(p, 64, policy))),
            false => Layers::new()
                .add("conv1", move |p| conv(p, channels, 64, 3, 1))
                .add_norm("bn1", move |p| batch_norm2d(p, 64, policy).with_relu()),
        }
    }

    /// One of the four groups: its first block changes the size, the others keep it.
    fn group(&self, group: usize) -> Layers {
        let width = 64 << group;
        let out = width * self.expansion();
        let before = if group == 0 { 64 } else { out / 2 };
        (0..self.blocks[group]).fold(Layers::new(), |layers, number| {
            let stride = if group > 0 && number == 0 { 2 } else { 1 };
            let channels = if number == 0 { before } else { out };
            let shape = ResidualShape::new([channels, width, out], stride, self.bottleneck);
            let (name, policy) = (number.to_string(), self.batch_norm);
            match policy {
                BatchNormPolicy::Exact => layers.add_layers(name, shape.cut_at_norms()),
                _ => layers.add(name, move |p| ResidualBlock::new(p, &shape, policy)),
            }
        })
    }

    /// How many times wider a block's output is than its middle.
    fn expansion(&self) -> i64 {
        if self.bottleneck { 4 } else { 1 }
    }
}

/// The convolutions of a block, each before its BatchNorm.
struct ResidualShape {
    convolutions: Vec<ConvShape>,
    /// The shortcut's, where the entry and the exit differ in shape.
    downsample: Option<ConvShape>,
}

impl ResidualShape {
    /// With these channels at the entry, in the middle and at the exit.
    fn new([entry, middle, exit]: [i64; 3], stride: i64, bottleneck: bool) -> Self {
        let convolutions = match bottleneck {
            true => vec![
                ConvShape::square(entry, middle, 1, 1),
                ConvShape::square(middle, middle, 3, stride),
                ConvShape::square(middle, exit, 1, 1),
            ],
            false => vec![
                ConvShape::square(entry, middle, 3, stride),
                ConvShape::square(middle, exit, 3, 1),
            ],
        };
        let differs = stride != 1 || entry != exit;
        let downsample = differs.then(|| ConvShape::square(entry, exit, 1, stride));
        Self { convolutions, downsample }
    }

    /// The block as a list that can be cut before each of its BatchNorms, which are exact.
    fn cut_at_norms(&self) -> Layers {
        let exact = BatchNormPolicy::Exact;
        let last = self.convolutions.len();
        let (entered, shortcut) = match self.downsample {
            Some(shape) => (downsampled(shape), "shortcut"),
            None => (Layers::new().stash("entry"), "entry"),
        };
        let inner = (1..).zip(&self.convolutions).fold(entered, |layers, (n, &shape)| {
            let layers = layers.add(format!("conv{n}"), move |p| shape.build(p));
            if n == last {
                return layers;
            }
            let norm = move |p: &Path| batch_norm2d(p, shape.to, exact).with_relu();
            layers.add_norm(format!("bn{n}"), norm)
        });
        let out = self.convolutions[last - 1].to;
        inner.pop_norm(format!("bn{last}"), shortcut, move |p| {
            let norm = batch_norm2d(p, out, exact);
            move |x, shortcut, train| norm.forward_add_relu(x, shortcut, train)
        })
    }
}

/// The shortcut of another shape, made and stashed before the convolutions, which begin from the entry again: so
/// nothing has to wait for both at a time.
fn downsampled(shape: ConvShape) -> Layers {
    let entered = Layers::new().stash("entry").add("downsample.0", move |p| shape.build(p));
    entered
        .add_norm("downsample.1", move |p| batch_norm2d(p, shape.to, BatchNormPolicy::Exact))
        .stash("shortcut")
        .pop("again", "entry", |_, entry| entry.shallow_clone())
}

/// A residual block: convolutions beside a shortcut.
#[derive(Debug)]
struct ResidualBlock {
    convolutions: Vec<(nn::Conv2D, BatchNorm)>,
    /// A 1×1 convolution where the entry and the exit differ in shape.
    downsample: Option<(nn::Conv2D, BatchNorm)>,
}

impl ResidualBlock {
    fn new(path: &Path, shape: &ResidualShape, policy: BatchNormPolicy) -> Self {
        let normed = |conv: Path, norm: Path, shape: &ConvShape| {
            (shape.build(&conv), batch_norm2d(&norm, shape.to, policy))
        };
        let convolutions =
            shape.convolutions.iter().zip(1..).map(|(shape, n)| {
                normed(path / format!("conv{n}"), path / format!("bn{n}"), shape)
            });
        let convolutions = convolutions.collect();
        let shortcut = path / "downsample";
        let downsample = shape.downsample.as_ref();
        let downsample = downsample.map(|shape| normed(&shortcut / 0, &shortcut / 1, shape));
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
