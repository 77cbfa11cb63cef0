//! AmoebaNet-D (L, F), an image classifier whose cells were found by evolution.
//!
//! "Regularized Evolution for Image Classifier Architecture Search", Real et al., 2018, with the two
//! numbers of "GPipe", Huang et al., 2018: L normal cells, and F filters in the first of them. Each
//! cell sees its two predecessors, so pairs of tensors flow from layer to layer.
//!
//! ```text
//! image ─► stem ─► reduction1 ─► reduction2 ─► group1: L/3 normal cells, F filters
//!           F/4        F/2           F                        │
//!                                           reduction3 ─► group2: L/3, 2F
//!                                               2F            │
//!                                           reduction4 ─► group3: L/3, 4F ─► head ─► logits
//!                                               4F
//! ```
//!
//! Each cell is one layer: L + 6 in all. With exact BatchNorms a cell is a list of its own.

mod cell;
mod cut_cell;
mod operation;

use std::iter;

use brimful::Layers;
use brimful::nn::BatchNormPolicy;
use tch::Tensor;
use tch::nn::{self, Module, Path};

use crate::ShapeError;
use crate::conv::ConvShape;
use crate::mlp::linear;
use cell::{AmoebaCell, CellInputs, NORMAL, REDUCTION, Recipe};
use cut_cell::{cut_cell, cut_conv};
use operation::ConvNorm;

/// Number of groups of normal cells.
const GROUPS: usize = 3;

/// Shape of an AmoebaNet-D.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AmoebaNet {
    /// Number of normal cells, L: a multiple of 3.
    pub cells: usize,
    /// Number of filters in the first normal cell, F: a multiple of 8.
    pub filters: i64,
    /// Number of logits.
    pub classes: i64,
    /// Policy of the BatchNorms: which statistics normalise, and when running statistics change.
    pub batch_norm: BatchNormPolicy,
}

impl AmoebaNet {
    /// Returns the shape of AmoebaNet-D (L, F) for images of three channels; the papers use 224×224 and 1,000
    /// classes.
    pub fn new(cells: usize, filters: i64, classes: i64) -> Self {
        Self { cells, filters, classes, batch_norm: BatchNormPolicy::default() }
    }

    /// Sets the policy of the BatchNorms.
    #[must_use]
    pub fn batch_norm(self, policy: BatchNormPolicy) -> Self {
        Self { batch_norm: policy, ..self }
    }

    /// Returns the network as a list: `stem`, `reduction1`, `reduction2`, `group1.0` and on, `reduction3`, `group2.0`
    /// and on, `reduction4`, `group3.0` and on, `head`.
    ///
    /// # Errors
    /// Fails if the cells do not form three equal groups, or the filters are not a positive multiple of 8.
    pub fn layers(&self) -> Result<Layers, ShapeError> {
        self.check()?;
        let classes = self.classes;
        let width = self.filters / 4;
        let entering = ConvShape::square(3, width, 3, 2);
        let policy = self.batch_norm;
        let stem = match policy {
            BatchNormPolicy::Exact => cut_conv(Layers::new(), "stem", entering, false),
            _ => Layers::new().add("stem", move |p| {
                let stem = ConvNorm::new(p, entering, policy);
                nn::func_t(move |x, train| stem.forward(x, train))
            }),
        };
        let cells =
            self.cells().fold((stem, CellInputs::of(width)), |(layers, entry), (name, recipe)| {
                let build = move |p: &Path| {
                    let cell = AmoebaCell::new(p, entry, recipe, policy);
                    move |x: &[Tensor], train| cell.forward(x, train)
                };
                let longer = match policy {
                    BatchNormPolicy::Exact => layers.add_layers(name, cut_cell(entry, recipe)),
                    _ => layers.add_many(name, build),
                };
                (longer, entry.after(recipe))
            });
        let (layers, CellInputs { current: features, .. }) = cells;
        Ok(layers.add_many("head", move |p| {
            let fc = linear(p, features, classes);
            move |x, _| vec![fc.forward(&x[0].adaptive_avg_pool2d([1, 1]).flatten(1, -1))]
        }))
    }

    fn check(&self) -> Result<(), ShapeError> {
        let Self { cells, filters, .. } = *self;
        if cells == 0 || cells % GROUPS != 0 {
            return Err(ShapeError::AmoebaNetCells { cells });
        }
        if filters < 8 || filters % 8 != 0 {
            return Err(ShapeError::AmoebaNetFilters { filters });
        }
        Ok(())
    }

    /// Returns the cells between stem and head, by name.
    fn cells(&self) -> impl Iterator<Item = (String, &'static Recipe)> {
        let each = self.cells / GROUPS;
        let reduction = |number: usize| (format!("reduction{number}"), &REDUCTION);
        let group = move |number: usize| {
            let normal = (0..each).map(move |cell| (format!("group{number}.{cell}"), &NORMAL));
            iter::once(reduction(number + 1)).chain(normal)
        };
        iter::once(reduction(1)).chain((1..=GROUPS).flat_map(group))
    }
}
