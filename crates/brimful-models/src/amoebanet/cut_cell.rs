//! A cell as a list of layers that can be cut before each of its exact BatchNorms. Its variables have the same names
//! as in a whole cell.
//!
//! Several tensors flow from layer to layer: first the one being worked on, then the output of the previous cell,
//! then the states so far.

use brimful::Layers;
use brimful::nn::BatchNormPolicy;
use tch::Tensor;
use tch::nn::Module;

use super::cell::{CellInputs, Recipe};
use super::operation::{AdapterShape, OperationKind, aside};
use crate::conv::ConvShape;
use crate::norm::batch_norm2d;

/// Makes a cell that takes the output of the previous cell, then that of the cell before it. The cell returns its
/// own output, then that of the previous cell.
pub(super) fn cut_cell(entry: CellInputs, recipe: &'static Recipe) -> Layers {
    let filters = entry.filters(recipe);
    let layers = Layers::new().add_many("enter", |_| {
        |x: &[Tensor], _| {
            let previous = x.get(1).unwrap_or(&x[0]);
            vec![x[0].relu(), previous.shallow_clone(), x[0].shallow_clone()]
        }
    });
    let layers = cut_conv(layers, "current", entry.entering(filters), false);
    let layers = cut_adapter(layers, entry.adapter(filters));
    let layers = (2..).zip(&recipe.sums).fold(layers, |layers, (number, sum)| {
        let [left, right] = *sum;
        let layers = cut_operation(layers, &format!("sum{number}.left"), left, 0, filters, recipe);
        let layers =
            cut_operation(layers, &format!("sum{number}.right"), right, 1, filters, recipe);
        layers.add_many(format!("sum{number}.added"), |_| {
            |x: &[Tensor], _| with_last(&x[2..], &x[0] + &x[1])
        })
    });
    layers.add_many("joined", move |_| {
        move |x: &[Tensor], _| {
            let states: Vec<_> = recipe.joined.iter().map(|state| &x[1 + state]).collect();
            vec![Tensor::cat(&states, 1), x[0].shallow_clone()]
        }
    })
}

/// Adds a convolution of the first tensor, and its BatchNorm.
pub(super) fn cut_conv(layers: Layers, name: &str, step: ConvShape, relu: bool) -> Layers {
    let layers = layers.add_many(format!("{name}.conv"), move |p| {
        let conv = step.build(p);
        move |x: &[Tensor], _| with_first(conv.forward(&x[0]), &x[1..])
    });
    cut_norm(layers, format!("{name}.norm"), step.to, relu)
}

fn cut_norm(layers: Layers, name: String, channels: i64, relu: bool) -> Layers {
    layers.add_norm_many(name, move |p| {
        let norm = batch_norm2d(p, channels, BatchNormPolicy::Exact);
        move |x: &[Tensor], train| {
            let normed = match relu {
                true => norm.forward_relu(&x[0], train),
                false => tch::nn::ModuleT::forward_t(&norm, &x[0], train),
            };
            with_first(normed, &x[1..])
        }
    })
}

/// Adds the adapter. The adapter takes state 0, the output from two cells before and the previous cell's output.
/// It returns the previous cell's output, then states 0 and 1.
fn cut_adapter(layers: Layers, shape: AdapterShape) -> Layers {
    let rectified = !matches!(shape, AdapterShape::Same);
    let layers = layers.add_many("previous.taken", move |_| {
        move |x: &[Tensor], _| {
            let taken = if rectified { x[1].relu() } else { x[1].shallow_clone() };
            vec![taken, x[2].shallow_clone(), x[0].shallow_clone()]
        }
    });
    let layers = match shape {
        AdapterShape::Same => layers,
        AdapterShape::Widen(step) => cut_conv(layers, "previous", step, false),
        AdapterShape::Halve { half, to } => {
            let layers = layers
                .add_many("previous.even", move |p| {
                    let even = half.build(p);
                    move |x: &[Tensor], _| with_first(even.forward(&x[0]), x)
                })
                .add_many("previous.odd", move |p| {
                    let odd = half.build(p);
                    move |x: &[Tensor], _| {
                        let halves = [x[0].shallow_clone(), odd.forward(&aside(&x[1]))];
                        with_first(Tensor::cat(&halves, 1), &x[2..])
                    }
                });
            cut_norm(layers, "previous.norm".into(), to, false)
        }
    };
    let kept = |x: &[Tensor], _| with_last(&x[1..], x[0].shallow_clone());
    layers.add_many("previous.kept", move |_| kept)
}

/// Adds an operation on a state. `before` is the number of results that come before the previous cell's output and
/// the states.
fn cut_operation(
    layers: Layers,
    name: &str,
    (kind, of): (OperationKind, usize),
    before: usize,
    filters: i64,
    recipe: &'static Recipe,
) -> Layers {
    let stride = recipe.stride_from(of);
    let steps = kind.steps(filters, stride);
    let convolves = !steps.is_empty();
    let layers = layers.add_many(format!("{name}.taken"), move |_| {
        move |x: &[Tensor], _| {
            let state = &x[before + 1 + of];
            let taken = if convolves { state.relu() } else { kind.plain(state, stride) };
            with_first(taken, x)
        }
    });
    let last = steps.len();
    steps.into_iter().enumerate().fold(layers, |layers, (number, step)| {
        cut_conv(layers, &format!("{name}.{number}"), step, number + 1 < last)
    })
}

fn with_first(first: Tensor, others: &[Tensor]) -> Vec<Tensor> {
    std::iter::once(first).chain(others.iter().map(Tensor::shallow_clone)).collect()
}

fn with_last(others: &[Tensor], last: Tensor) -> Vec<Tensor> {
    others.iter().map(Tensor::shallow_clone).chain([last]).collect()
}
