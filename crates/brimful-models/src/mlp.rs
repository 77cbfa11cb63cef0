//! A multi-layer perceptron: linear layers with ReLU between them.

use brimful::Layers;
use tch::nn::{self, Init, Path};

/// Returns a multi-layer perceptron for samples of any shape with `inputs` numbers each, one hidden layer for each
/// given width, and a logit for each class.
///
/// Layers: `flatten`, then `fc1`, `relu1`, `fc2` and so on, the last without a ReLU.
pub fn mlp(inputs: i64, hidden: &[i64], classes: i64) -> Layers {
    let flatten = Layers::new().add_fn("flatten", |x| x.flatten(1, -1));
    let widths: Vec<_> = [&[inputs], hidden, &[classes]].concat();
    let pairs = widths.windows(2).zip(1..);
    pairs.fold(flatten, |layers, (width, number)| {
        let (from, to) = (width[0], width[1]);
        let layers = layers.add(format!("fc{number}"), move |p| linear(p, from, to));
        let is_last = number == widths.len() - 1;
        if is_last { layers } else { layers.add_fn(format!("relu{number}"), |x| x.relu()) }
    })
}

/// Builds a linear layer with PyTorch's initialisation: uniform within 1/√inputs, weights and biases.
pub(crate) fn linear(path: &Path, inputs: i64, outputs: i64) -> nn::Linear {
    let bound = 1.0 / (inputs as f64).sqrt();
    let init = Init::Uniform { lo: -bound, up: bound };
    let config = nn::LinearConfig { ws_init: init, bs_init: Some(init), bias: true };
    nn::linear(path, inputs, outputs, config)
}
