//! What a cell does to one of its states: nothing, a pooling, or convolutions.

use std::cell::OnceCell;

use brimful::nn::BatchNorm;
use tch::Tensor;
use tch::nn::{self, Module, ModuleT, Path};

use crate::conv::{conv, conv_rectangular};
use crate::norm::batch_norm2d;

/// An operation as the papers name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OperationKind {
    Same,
    MaxPool2,
    MaxPool3,
    MeanPool3,
    Conv1x1,
    /// In a quarter of the filters.
    Conv3x3,
    /// In a quarter of the filters.
    Conv1x7And7x1,
}

/// A state of a cell, and what is left of it without its negative numbers, made once for all
/// convolutions that start from it.
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

/// An operation in its place.
#[derive(Debug)]
pub(super) enum Operation {
    Same,
    Pool {
        kind: PoolKind,
        stride: i64,
    },
    /// Each with a ReLU before it.
    Convolve(Vec<ConvNorm>),
}

#[derive(Debug, Clone, Copy)]
pub(super) enum PoolKind {
    Max2,
    Max3,
    Mean3,
}

impl Operation {
    /// Keeps the filters, and divides the image's sides by the stride.
    pub(super) fn new(path: &Path, kind: OperationKind, filters: i64, stride: i64) -> Self {
        let quarter = filters / 4;
        let step = |number: usize, from, to, kernel, stride| {
            ConvNorm::new(&(path / number), from, to, kernel, stride)
        };
        let narrow = || step(0, filters, quarter, [1, 1], [1, 1]);
        match kind {
            OperationKind::Same => Self::Same,
            OperationKind::MaxPool2 => Self::Pool { kind: PoolKind::Max2, stride },
            OperationKind::MaxPool3 => Self::Pool { kind: PoolKind::Max3, stride },
            OperationKind::MeanPool3 => Self::Pool { kind: PoolKind::Mean3, stride },
            OperationKind::Conv1x1 => {
                Self::Convolve(vec![step(0, filters, filters, [1, 1], [stride, stride])])
            }
            OperationKind::Conv3x3 => Self::Convolve(vec![
                narrow(),
                step(1, quarter, quarter, [3, 3], [stride, stride]),
                step(2, quarter, filters, [1, 1], [1, 1]),
            ]),
            OperationKind::Conv1x7And7x1 => Self::Convolve(vec![
                narrow(),
                step(1, quarter, quarter, [1, 7], [1, stride]),
                step(2, quarter, quarter, [7, 1], [stride, 1]),
                step(3, quarter, filters, [1, 1], [1, 1]),
            ]),
        }
    }

    pub(super) fn apply(&self, state: &CellState, train: bool) -> Tensor {
        match self {
            Self::Same => state.value.shallow_clone(),
            Self::Pool { kind, stride } => kind.apply(&state.value, *stride),
            Self::Convolve(steps) => {
                let (last, others) = steps.split_last().expect("a convolution has a step");
                let x = state.rectified().shallow_clone();
                let x = others.iter().fold(x, |x, step| step.forward_relu(&x, train));
                last.forward(&x, train)
            }
        }
    }
}

impl PoolKind {
    /// An odd side counts as the next even one.
    fn apply(self, x: &Tensor, stride: i64) -> Tensor {
        let stride = [stride; 2];
        match self {
            Self::Max2 => x.max_pool2d([2, 2], stride, [0, 0], [1, 1], true),
            Self::Max3 => x.max_pool2d([3, 3], stride, [1, 1], [1, 1], false),
            Self::Mean3 => x.avg_pool2d([3, 3], stride, [1, 1], false, false, None::<i64>),
        }
    }
}

/// A convolution and its normalisation.
#[derive(Debug)]
pub(super) struct ConvNorm {
    conv: nn::Conv2D,
    norm: BatchNorm,
}

impl ConvNorm {
    fn new(path: &Path, from: i64, to: i64, kernel: [i64; 2], stride: [i64; 2]) -> Self {
        let conv = conv_rectangular(&(path / "conv"), from, to, kernel, stride);
        Self { conv, norm: batch_norm2d(&(path / "norm"), to) }
    }

    pub(super) fn square(path: &Path, from: i64, to: i64, kernel: i64, stride: i64) -> Self {
        Self::new(path, from, to, [kernel; 2], [stride; 2])
    }

    pub(super) fn forward(&self, x: &Tensor, train: bool) -> Tensor {
        self.norm.forward_t(&self.conv.forward(x), train)
    }

    fn forward_relu(&self, x: &Tensor, train: bool) -> Tensor {
        self.norm.forward_relu(&self.conv.forward(x), train)
    }
}

/// Brings the output of the cell before the last to the size and filters of this one.
#[derive(Debug)]
pub(super) enum Adapter {
    Same,
    Widen(ConvNorm),
    /// Two convolutions of stride 2, one of them a pixel aside, so that no pixel is left out.
    Halve {
        even: nn::Conv2D,
        odd: nn::Conv2D,
        norm: BatchNorm,
    },
}

impl Adapter {
    pub(super) fn new(path: &Path, from: i64, to: i64, halve: bool) -> Self {
        if halve {
            let half = |name: &str| conv(&(path / name), from, to / 2, 1, 2);
            let norm = batch_norm2d(&(path / "norm"), to);
            return Self::Halve { even: half("even"), odd: half("odd"), norm };
        }
        if from == to {
            return Self::Same;
        }
        Self::Widen(ConvNorm::square(path, from, to, 1, 1))
    }

    pub(super) fn forward(&self, x: &Tensor, train: bool) -> Tensor {
        match self {
            Self::Same => x.shallow_clone(),
            Self::Widen(step) => step.forward(&x.relu(), train),
            Self::Halve { even, odd, norm } => {
                let x = x.relu();
                // One row and one column go at the front, and zeros come at the back.
                let aside = x.constant_pad_nd([-1, 1, -1, 1]);
                let halves = [even.forward(&x), odd.forward(&aside)];
                norm.forward_t(&Tensor::cat(&halves, 1), train)
            }
        }
    }
}
