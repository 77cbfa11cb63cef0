//! Residual networks for images, with torchvision's names and shapes, so that its weights load.
//!
//! "Deep Residual Learning for Image Recognition", He et al., 2015; a bottleneck's stride is at its 3×3 convolution,
//! as in torchvision. Each residual block is one layer. With exact BatchNorms each convolution and each BatchNorm is
//! a layer, because each BatchNorm is a barrier across micro-batches. The variables have the same names either way.

use brimful::Layers;
use brimful::nn::{BatchNorm, BatchNormPolicy, second_use};
use tch::Tensor;
use tch::nn::{self, Module, ModuleT, Path};

use crate::conv::{ConvShape, conv};
use crate::mlp::linear;
use crate::norm::batch_norm2d;
use crate::stem::StemConv;

/// First layers of the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Stem {
    /// A 7×7 convolution and a pooling, each of stride 2: for photographs of about 224×224.
    #[default]
    Large,
    /// A 3×3 convolution of stride 1: for images of 8×8 to 64×64, which a large stem would shrink too far.
    Small,
}

/// Shape of a residual network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResNet {
    /// Number of residual blocks in each of the four groups.
    pub blocks: [usize; 4],
    /// True if a block has three convolutions with a narrow one in the middle; else it has two.
    pub bottleneck: bool,
    /// Number of channels of an image.
    pub in_channels: i64,
    /// Number of logits.
    pub classes: i64,
    /// First layers of the network.
    pub stem: Stem,
    /// Policy of the BatchNorms: which statistics normalise, and when running statistics change.
    pub batch_norm: BatchNormPolicy,
}

/// Returns ResNet-18, for 224×224 images of three channels.
pub fn resnet18(classes: i64) -> Layers {
    ResNet::resnet18(classes).layers()
}

/// Returns ResNet-50, for 224×224 images of three channels.
pub fn resnet50(classes: i64) -> Layers {
    ResNet::resnet50(classes).layers()
}

/// Returns ResNet-101, for 224×224 images of three channels.
pub fn resnet101(classes: i64) -> Layers {
    ResNet::resnet101(classes).layers()
}

impl ResNet {
    /// Returns the shape of ResNet-18.
    pub fn resnet18(classes: i64) -> Self {
        Self::new([2, 2, 2, 2], false, classes)
    }

    /// Returns the shape of ResNet-50.
    pub fn resnet50(classes: i64) -> Self {
        Self::new([3, 4, 6, 3], true, classes)
    }

    /// Returns the shape of ResNet-101.
    pub fn resnet101(classes: i64) -> Self {
        Self::new([3, 4, 23, 3], true, classes)
    }

    fn new(blocks: [usize; 4], bottleneck: bool, classes: i64) -> Self {
        let batch_norm = BatchNormPolicy::default();
        Self { blocks, bottleneck, in_channels: 3, classes, stem: Stem::default(), batch_norm }
    }

    /// Changes the shape to small images with this many channels: handwritten digits have one.
    #[must_use]
    pub fn small_images(self, in_channels: i64) -> Self {
        Self { in_channels, stem: Stem::Small, ..self }
    }

    /// Sets the policy of the BatchNorms.
    #[must_use]
    pub fn batch_norm(self, policy: BatchNormPolicy) -> Self {
        Self { batch_norm: policy, ..self }
    }

    /// Returns the network as a list: `conv1`, `bn1` (with its ReLU, and a large stem's pooling), the blocks
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

    /// Returns one of the four groups: its first block changes the size, the others keep it.
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

    /// Returns the ratio of a block's output width to its inner width.
    fn expansion(&self) -> i64 {
        if self.bottleneck { 4 } else { 1 }
    }
}

/// Convolutions of a block, each before its BatchNorm.
struct ResidualShape {
    convolutions: Vec<ConvShape>,
    /// Convolution of the shortcut, if input and output differ in shape.
    downsample: Option<ConvShape>,
}

impl ResidualShape {
    /// Makes the shape of a block with these channels at its input, in the middle and at its output.
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

    /// Returns the block as a list of layers that can be cut before each of its exact BatchNorms.
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

/// Returns the layers of a downsampling shortcut. The shortcut is computed and stashed before the convolutions.
/// These then start from the block's input again, so that no layer waits for both branches at once.
fn downsampled(shape: ConvShape) -> Layers {
    let entered = Layers::new().stash("entry").add("downsample.0", move |p| shape.build(p));
    entered
        .add_norm("downsample.1", move |p| batch_norm2d(p, shape.to, BatchNormPolicy::Exact))
        .stash("shortcut")
        .pop("again", "entry", |_, entry| entry.shallow_clone())
}

/// A residual block: convolutions and a shortcut.
#[derive(Debug)]
struct ResidualBlock {
    convolutions: Vec<(nn::Conv2D, BatchNorm)>,
    /// 1×1 convolution of the shortcut, if input and output differ in shape.
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

/// A BatchNorm, a ReLU and a pooling of stride 2.
#[derive(Debug)]
struct NormPool(BatchNorm);

impl ModuleT for NormPool {
    fn forward_t(&self, x: &Tensor, train: bool) -> Tensor {
        self.0.forward_relu_pool(x, train)
    }
}
