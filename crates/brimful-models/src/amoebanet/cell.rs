//! The two cells of AmoebaNet-D, and their forward.
//!
//! A cell makes five sums, each of two operations on earlier states, and concatenates some states at the end.
//! State 0 is the output of the previous cell, state 1 the output of the cell before that one.
//!
//! ```text
//! normal                                          reduction: half the size, twice the filters
//! 2 = 1×1 conv(1)  + max pool 3(1)                2 = max pool 2(0)     + max pool 3(0)
//! 3 = 1            + 1×7, 7×1 conv(0)             3 = 2                 + 3×3 conv(1)
//! 4 = 1×1 conv(0)  + 1×7, 7×1 conv(0)             4 = 1×7, 7×1 conv(2)  + max pool 3(2)
//! 5 = max pool 3(2) + 2                           5 = 3                 + max pool 2(1)
//! 6 = mean pool 3(1) + 1×1 conv(5)                6 = mean pool 3(2)    + 1×1 conv(3)
//! out: 0, 3, 4, 6                                 out: 4, 5, 6
//! ```
//!
//! The paper's figure concatenates 4, 5 and 6 of the normal cell; the authors' program, and the parameter counts of
//! both later papers, use 0, 3, 4 and 6.

use brimful::nn::BatchNormPolicy;
use tch::Tensor;
use tch::nn::Path;

use super::operation::OperationKind::{
    Conv1x1, Conv1x7And7x1, Conv3x3, MaxPool2, MaxPool3, MeanPool3, Same,
};
use super::operation::{Adapter, AdapterShape, CellState, ConvNorm, Operation, OperationKind};
use crate::conv::ConvShape;

/// Structure of a cell, as the papers draw it.
#[derive(Debug)]
pub(super) struct Recipe {
    /// Two operations for each sum, each with the state that it takes.
    pub(super) sums: [[(OperationKind, usize); 2]; 5],
    /// States concatenated at the end.
    pub(super) joined: &'static [usize],
    /// Stride of the cell; 2 halves the image.
    stride: i64,
}

impl Recipe {
    /// Returns the stride of an operation on a state: only the cell's inputs still have the full size.
    pub(super) fn stride_from(&self, state: usize) -> i64 {
        if state < 2 { self.stride } else { 1 }
    }
}

pub(super) static NORMAL: Recipe = Recipe {
    sums: [
        [(Conv1x1, 1), (MaxPool3, 1)],
        [(Same, 1), (Conv1x7And7x1, 0)],
        [(Conv1x1, 0), (Conv1x7And7x1, 0)],
        [(MaxPool3, 2), (Same, 2)],
        [(MeanPool3, 1), (Conv1x1, 5)],
    ],
    joined: &[0, 3, 4, 6],
    stride: 1,
};

pub(super) static REDUCTION: Recipe = Recipe {
    sums: [
        [(MaxPool2, 0), (MaxPool3, 0)],
        [(Same, 2), (Conv3x3, 1)],
        [(Conv1x7And7x1, 2), (MaxPool3, 2)],
        [(Same, 3), (MaxPool2, 1)],
        [(MeanPool3, 2), (Conv1x1, 3)],
    ],
    joined: &[4, 5, 6],
    stride: 2,
};

/// Channels of a cell's inputs.
#[derive(Debug, Clone, Copy)]
pub(super) struct CellInputs {
    /// Channels of the previous cell's output.
    pub(super) current: i64,
    /// Channels of the output from two cells before.
    previous: i64,
    /// True if the input from two cells before has a larger image.
    is_halved: bool,
    /// Filters of the previous cell.
    filters: i64,
}

impl CellInputs {
    /// Returns the inputs after a stem of this width, which stands for both predecessors.
    pub(super) fn of(width: i64) -> Self {
        Self { current: width, previous: width, is_halved: false, filters: width }
    }

    /// Returns the inputs of the cell that follows this one.
    pub(super) fn after(self, recipe: &Recipe) -> Self {
        let filters = self.filters(recipe);
        let current = filters * recipe.joined.len() as i64;
        Self { current, previous: self.current, is_halved: recipe.stride == 2, filters }
    }

    /// Returns the convolution for the previous cell's output.
    pub(super) fn entering(self, filters: i64) -> ConvShape {
        ConvShape::square(self.current, filters, 1, 1)
    }

    /// Returns the adapter for the output from two cells before.
    pub(super) fn adapter(self, filters: i64) -> AdapterShape {
        AdapterShape::new(self.previous, filters, self.is_halved)
    }

    /// Returns the filters of a cell: they grow as the image shrinks.
    pub(super) fn filters(self, recipe: &Recipe) -> i64 {
        self.filters * recipe.stride
    }
}

/// A cell with its variables.
#[derive(Debug)]
pub(super) struct AmoebaCell {
    current: ConvNorm,
    previous: Adapter,
    sums: Vec<[(Operation, usize); 2]>,
    joined: &'static [usize],
}

impl AmoebaCell {
    pub(super) fn new(
        path: &Path,
        entry: CellInputs,
        recipe: &'static Recipe,
        policy: BatchNormPolicy,
    ) -> Self {
        let filters = entry.filters(recipe);
        let operation = |path: Path, (kind, of): (OperationKind, usize)| {
            (Operation::new(&path, kind, filters, recipe.stride_from(of), policy), of)
        };
        let sum = |(number, [left, right]): (usize, &[(OperationKind, usize); 2])| {
            let path = path / format!("sum{}", number + 2);
            [operation(&path / "left", *left), operation(&path / "right", *right)]
        };
        Self {
            current: ConvNorm::new(&(path / "current"), entry.entering(filters), policy),
            previous: Adapter::new(&(path / "previous"), entry.adapter(filters), policy),
            sums: recipe.sums.iter().enumerate().map(sum).collect(),
            joined: recipe.joined,
        }
    }

    /// Takes the output of the previous cell, then that of the cell before it. Returns this cell's output, then
    /// that of the previous cell.
    pub(super) fn forward(&self, x: &[Tensor], train: bool) -> Vec<Tensor> {
        let (current, previous) = (&x[0], x.get(1).unwrap_or(&x[0]));
        let entered = self.current.forward(&current.relu(), train);
        let adapted = self.previous.forward(previous, train);
        let mut states = vec![CellState::new(entered), CellState::new(adapted)];
        for [(left, a), (right, b)] in &self.sums {
            let sum = left.apply(&states[*a], train) + right.apply(&states[*b], train);
            states.push(CellState::new(sum));
        }
        let joined: Vec<_> = self.joined.iter().map(|state| states[*state].value()).collect();
        vec![Tensor::cat(&joined, 1), current.shallow_clone()]
    }
}
