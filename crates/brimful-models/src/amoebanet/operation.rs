//! Operations on a cell's states: identity, pooling and convolutions.

use std::cell::OnceCell;

use brimful::nn::{BatchNorm, BatchNormPolicy};
use tch::Tensor;
use tch::nn::{self, Module, ModuleT, Path};

use crate::conv::ConvShape;
use crate::norm::batch_norm2d;

/// An operation, by its name in the papers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OperationKind {
    Same,
    MaxPool2,
    MaxPool3,
    MeanPool3,
    Conv1x1,
    /// Computed with a quarter of the filters, between two 1×1 convolutions.
    Conv3x3,
    /// Computed with a quarter of the filters, between two 1×1 convolutions.
    Conv1x7And7x1,
}

/// State of a cell, with its ReLU, which is computed once for all convolutions of the state.
#[derive(Debug)]
pub(super) struct CellState {
    value: Tensor,
    rectified: OnceCell<Tensor>,
}

impl CellState {
    pub(super) fn new(value: Tensor) -> Self {
        Self { value, rectified: OnceCell::new() }
    }

    pub(super) fn value(&self) -> &Tensor {
        &self.value
    }

    fn rectified(&self) -> &Tensor {
        self.rectified.get_or_init(|| self.value.relu())
    }
}

/// An operation with its variables.
#[derive(Debug)]
pub(super) struct Operation {
    kind: OperationKind,
    stride: i64,
    /// Convolutions, each after a ReLU.
    steps: Vec<ConvNorm>,
}

impl OperationKind {
    /// Returns the operation's convolutions, each after a ReLU. Together they keep the filters, and divide the
    /// image's sides by the stride.
    pub(super) fn steps(self, filters: i64, stride: i64) -> Vec<ConvShape> {
        let quarter = filters / 4;
        let narrow = ConvShape::square(filters, quarter, 1, 1);
        let wide = ConvShape::square(quarter, filters, 1, 1);
        let long = |kernel, stride| ConvShape { from: quarter, to: quarter, kernel, stride };
        match self {
            Self::Same | Self::MaxPool2 | Self::MaxPool3 | Self::MeanPool3 => Vec::new(),
            Self::Conv1x1 => vec![ConvShape::square(filters, filters, 1, stride)],
            Self::Conv3x3 => vec![narrow, ConvShape::square(quarter, quarter, 3, stride), wide],
            Self::Conv1x7And7x1 => {
                vec![narrow, long([1, 7], [1, stride]), long([7, 1], [stride, 1]), wide]
            }
        }
    }

    /// Applies an operation without convolutions. Odd sides round up.
    pub(super) fn plain(self, x: &Tensor, stride: i64) -> Tensor {
        let stride = [stride; 2];
        match self {
            Self::MaxPool2 => x.max_pool2d([2, 2], stride, [0, 0], [1, 1], true),
            Self::MaxPool3 => x.max_pool2d([3, 3], stride, [1, 1], [1, 1], false),
            Self::MeanPool3 => x.avg_pool2d([3, 3], stride, [1, 1], false, false, None::<i64>),
            _ => x.shallow_clone(),
        }
    }
}

impl Operation {
    /// Builds the operation. It keeps the filters, and divides the image's sides by the stride.
    pub(super) fn new(
        path: &Path,
        kind: OperationKind,
        filters: i64,
        stride: i64,
        policy: BatchNormPolicy,
    ) -> Self {
        let steps = kind.steps(filters, stride).into_iter().enumerate();
        let step = |(number, step)| ConvNorm::new(&(path / number), step, policy);
        Self { kind, stride, steps: steps.map(step).collect() }
    }

    pub(super) fn apply(&self, state: &CellState, train: bool) -> Tensor {
        let Some((last, others)) = self.steps.split_last() else {
            return self.kind.plain(&state.value, self.stride);
        };
        let x = state.rectified().shallow_clone();
        let x = others.iter().fold(x, |x, step| step.forward_relu(&x, train));
        last.forward(&x, train)
    }
}

/// A convolution and its BatchNorm.
#[derive(Debug)]
pub(super) struct ConvNorm {
    conv: nn::Conv2D,
    norm: BatchNorm,
}

impl ConvNorm {
    pub(super) fn new(path: &Path, step: ConvShape, policy: BatchNormPolicy) -> Self {
        let norm = batch_norm2d(&(path / "norm"), step.to, policy);
        Self { conv: step.build(&(path / "conv")), norm }
    }

    pub(super) fn forward(&self, x: &Tensor, train: bool) -> Tensor {
        self.norm.forward_t(&self.conv.forward(x), train)
    }

    fn forward_relu(&self, x: &Tensor, train: bool) -> Tensor {
        self.norm.forward_relu(&self.conv.forward(x), train)
    }
}

/// Shape of the layer that brings the output from two cells before to this cell's size and filters.
#[derive(Debug, Clone, Copy)]
pub(super) enum AdapterShape {
    Same,
    Widen(ConvShape),
    /// Two convolutions of stride 2, one of them offset by a pixel, so that no pixel is left out.
    Halve {
        half: ConvShape,
        to: i64,
    },
}

impl AdapterShape {
    pub(super) fn new(from: i64, to: i64, halve: bool) -> Self {
        match (halve, from == to) {
            (true, _) => Self::Halve { half: ConvShape::square(from, to / 2, 1, 2), to },
            (false, true) => Self::Same,
            (false, false) => Self::Widen(ConvShape::square(from, to, 1, 1)),
        }
    }
}

/// An adapter with its variables.
#[derive(Debug)]
pub(super) enum Adapter {
    Same,
    Widen(ConvNorm),
    Halve { even: nn::Conv2D, odd: nn::Conv2D, norm: BatchNorm },
}

/// Shifts the image by one row and one column: drops the first ones, and appends zeros at the end.
pub(super) fn aside(x: &Tensor) -> Tensor {
    x.constant_pad_nd([-1, 1, -1, 1])
}

impl Adapter {
    pub(super) fn new(path: &Path, shape: AdapterShape, policy: BatchNormPolicy) -> Self {
        match shape {
            AdapterShape::Same => Self::Same,
            AdapterShape::Widen(step) => Self::Widen(ConvNorm::new(path, step, policy)),
            AdapterShape::Halve { half, to } => {
                let norm = batch_norm2d(&(path / "norm"), to, policy);
                Self::Halve {
                    even: half.build(&(path / "even")),
                    odd: half.build(&(path / "odd")),
                    norm,
                }
            }
        }
    }

    pub(super) fn forward(&self, x: &Tensor, train: bool) -> Tensor {
        match self {
            Self::Same => x.shallow_clone(),
            Self::Widen(step) => step.forward(&x.relu(), train),
            Self::Halve { even, odd, norm } => {
                let x = x.relu();
                let halves = [even.forward(&x), odd.forward(&aside(&x))];
                norm.forward_t(&Tensor::cat(&halves, 1), train)
            }
        }
    }
}
