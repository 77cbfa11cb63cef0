//! A U-Net (B, C), which classifies each pixel of an image.
//!
//! "U-Net: Convolutional Networks for Biomedical Image Segmentation", Ronneberger et al., 2015, with
//! the two numbers of "torchgpipe: On-the-fly Pipeline Parallelism for Training Giant Models", Kim
//! et al., 2020: B blocks in each cell, and C channels in the first.
//!
//! ```text
//! image 3 ─► [C] ──────────────── skip C ────────────────► [2C → C/2] ─► 1×1 ─► mask 1
//!             │ pool                                            ▲ up
//!            [2C] ─────────────── skip 2C ───────────────► [4C → C]
//!             │ pool                                            ▲ up
//!            [4C] ─────────────── skip 4C ───────────────► [8C → 2C]
//!             │ pool                                            ▲ up
//!            [8C] ─────────────── skip 8C ───────────────► [16C → 4C]
//!             │ pool                                            ▲ up
//!            [16C] ────────────── skip 16C ──────────────► [32C → 8C]
//!             │ pool                                            ▲ up
//!             └─────────────► [16C → 32C → 16C] ────────────────┘
//!
//! [ ]  a cell of B blocks; the first changes the channels, and in the bottom cell also the last
//! block: 3×3 convolution, dropout of whole channels, instance normalisation, leaky ReLU
//! ```
//!
//! Each block is one layer, as are each pool, up, and end of a skip: 11 B + 21 in all.

use brimful::Layers;
use tch::Tensor;
use tch::nn::{self, Module, ModuleT, Path};

use crate::ShapeError;
use crate::conv::conv;

/// Number of times that the image is halved on the way down.
const DEPTH: u32 = 5;
/// Epsilon against division by zero, as in PyTorch.
const EPSILON: f64 = 1e-5;

/// Shape of a U-Net.
#[derive(Debug, Clone, PartialEq)]
pub struct UNet {
    /// Number of blocks in each cell, B: at least two.
    pub blocks: usize,
    /// Number of channels of the first cell, C: an even number.
    pub channels: i64,
    /// Number of channels of an image.
    pub in_channels: i64,
    /// Number of logits for each pixel.
    pub out_channels: i64,
    /// Probability with which training drops a channel; 0 for none.
    pub dropout: f64,
}

impl UNet {
    /// Returns the shape of the paper's U-Net (B, C): colour images, one logit per pixel, dropout of 0.1.
    pub fn new(blocks: usize, channels: i64) -> Self {
        Self { blocks, channels, in_channels: 3, out_channels: 1, dropout: 0.1 }
    }

    /// Returns the network as a list: `encoder0.0` and on, `skip0`, `pool0`, … `bottom.0` and on, `up4`, `join4`,
    /// `decoder4.0` and on, … `head`.
    ///
    /// Images need sides that are multiples of 32, and more than 32×32 pixels.
    ///
    /// # Errors
    /// Fails if a cell has less than two blocks, or the channels are not a positive even number.
    pub fn layers(&self) -> Result<Layers, ShapeError> {
        self.check()?;
        let (last, logits) = (self.channels / 2, self.out_channels);
        let down = (0..DEPTH).fold(Layers::new(), |layers, level| self.down(layers, level));
        let bottom = self.at(DEPTH);
        let around = down.add_layers("bottom", self.cell([bottom / 2, bottom, bottom / 2]));
        let up = (0..DEPTH).rev().fold(around, |layers, level| self.up(layers, level));
        Ok(up.add("head", move |p| conv(p, last, logits, 1, 1)))
    }

    fn check(&self) -> Result<(), ShapeError> {
        let Self { blocks, channels, .. } = *self;
        if blocks < 2 {
            return Err(ShapeError::UNetBlocks { blocks });
        }
        if channels < 2 || channels % 2 != 0 {
            return Err(ShapeError::UNetChannels { channels });
        }
        Ok(())
    }

    fn down(&self, layers: Layers, level: u32) -> Layers {
        let before = if level == 0 { self.in_channels } else { self.at(level - 1) };
        let width = self.at(level);
        layers
            .add_layers(format!("encoder{level}"), self.cell([before, width, width]))
            .stash(format!("skip{level}"))
            .add_fn(format!("pool{level}"), halve)
    }

    fn up(&self, layers: Layers, level: u32) -> Layers {
        let width = self.at(level);
        let skip = format!("skip{level}");
        layers
            .add_fn(format!("up{level}"), double)
            .pop(format!("join{level}"), skip, |x, skip| Tensor::cat(&[skip, x], 1))
            .add_layers(format!("decoder{level}"), self.cell([2 * width, width / 2, width / 2]))
    }

    /// Returns the channels of a level's skip connection.
    fn at(&self, level: u32) -> i64 {
        self.channels << level
    }

    /// Returns B blocks, with these channels at the input, in the middle and at the output.
    fn cell(&self, [entry, middle, exit]: [i64; 3]) -> Layers {
        let (blocks, dropout) = (self.blocks, self.dropout);
        (0..blocks).fold(Layers::new(), |layers, number| {
            let from = if number == 0 { entry } else { middle };
            let to = if number == blocks - 1 { exit } else { middle };
            let block = move |p: &Path| ConvBlock { conv: conv(p, from, to, 3, 1), dropout };
            layers.add(number.to_string(), block)
        })
    }
}

/// A convolution with dropout, normalisation and activation.
#[derive(Debug)]
struct ConvBlock {
    conv: nn::Conv2D,
    dropout: f64,
}

impl ModuleT for ConvBlock {
    fn forward_t(&self, x: &Tensor, train: bool) -> Tensor {
        // In place: nothing else needs the outputs of the convolution and of the normalisation.
        let x = self.conv.forward(x).feature_dropout_(self.dropout, train);
        let (samples, channels, height, width) = shape(&x);
        // Copies if the memory format is channels last.
        let apart = x.reshape([1, samples * channels, height, width]);
        normed(&apart).leaky_relu_().view([samples, channels, height, width])
    }
}

/// Normalises each channel of each sample to mean 0 and variance 1, in training and in evaluation.
fn normed(x: &Tensor) -> Tensor {
    let none = None::<&Tensor>;
    Tensor::batch_norm(x, none, none, none, none, true, 0.0, EPSILON, true)
}

fn halve(x: &Tensor) -> Tensor {
    let (_, _, height, width) = shape(x);
    assert!(
        height % 2 == 0 && width % 2 == 0 && height * width > 4,
        "a U-Net halves its image {DEPTH} times down to more than one pixel, but {height}×{width} \
         cannot be halved: give it sides that are multiples of 32, such as 64×64"
    );
    x.max_pool2d_default(2)
}

fn double(x: &Tensor) -> Tensor {
    let (_, _, height, width) = shape(x);
    x.upsample_nearest2d([2 * height, 2 * width], None, None)
}

fn shape(x: &Tensor) -> (i64, i64, i64, i64) {
    x.size4().expect("samples × channels × height × width")
}
