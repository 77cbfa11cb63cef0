//! Layers that have been built: a module like any other of tch.

use std::fmt;
use std::sync::Arc;

use tch::Tensor;
use tch::nn::ModuleT;

/// A layer in its place.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) name: String,
    pub(super) module: Box<dyn ModuleT>,
}

/// Layers that have been built, be it all of a model's or a stage's part of them.
#[derive(Debug)]
pub struct Model {
    layers: Vec<Layer>,
}

impl Model {
    pub(super) fn new(layers: Vec<Layer>) -> Self {
        Self { layers }
    }

    /// How many layers there are.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Whether there is no layer.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// The layers' names, in order.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.layers.iter().map(|layer| layer.name.as_str())
    }

    /// Runs one layer alone.
    ///
    /// # Panics
    /// When there are not that many layers, and when the layer itself does.
    pub fn forward_layer(&self, position: usize, x: &Tensor, train: bool) -> Tensor {
        self.layers[position].module.forward_t(x, train)
    }
}

impl ModuleT for Model {
    fn forward_t(&self, x: &Tensor, train: bool) -> Tensor {
        // Each layer's input is let go as soon as its output is there.
        self.layers.iter().fold(x.shallow_clone(), |x, layer| layer.module.forward_t(&x, train))
    }
}

type Call = dyn Fn(&Tensor, bool) -> Tensor + Send + Sync;

/// A function in a module's clothes.
#[derive(Clone)]
pub(super) struct Function(pub(super) Arc<Call>);

impl fmt::Debug for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("function")
    }
}

impl ModuleT for Function {
    fn forward_t(&self, x: &Tensor, train: bool) -> Tensor {
        (self.0)(x, train)
    }
}
