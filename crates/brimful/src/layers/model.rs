//! Built layers: a module like any other of tch.

use std::fmt;

use tch::nn::ModuleT;
use tch::{Device, Tensor};

use super::skips::Stashed;
use crate::nn::ExactNorm;
use crate::random::{Generator, StepRng};

pub(super) type ManyFunction = dyn Fn(&[Tensor], bool) -> Vec<Tensor> + Send;
pub(super) type PopFunction = dyn Fn(&[Tensor], &[Tensor], bool) -> Vec<Tensor> + Send;

/// A built layer.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) name: String,
    pub(super) module: Module,
    /// The layer's exact BatchNorm, if it has one.
    pub(super) norm: Option<ExactNorm>,
    /// Skip that the layer pops.
    pub(super) popped: Option<Popped>,
}

/// A skip that a layer pops.
#[derive(Debug, Clone, Copy)]
pub(super) struct Popped {
    /// Position of the stash.
    pub(super) stash: usize,
    /// True if no later layer pops the same stash.
    pub(super) last: bool,
}

/// Function of a layer.
pub(super) enum Module {
    One(Box<dyn ModuleT>),
    Many(Box<ManyFunction>),
    Stash,
    Pop(Box<PopFunction>),
}

/// Built layers: all of a model's, or those of one stage.
#[derive(Debug)]
pub struct Model {
    /// Position of the first of these layers in the whole model.
    first: usize,
    layers: Vec<Layer>,
}

impl Model {
    pub(super) fn new(first: usize, layers: Vec<Layer>) -> Self {
        Self { first, layers }
    }

    /// Returns the number of layers.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Returns whether there is no layer.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// Returns the layers' names, in order.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.layers.iter().map(|layer| layer.name.as_str())
    }

    /// Returns the exact BatchNorm with which these layers begin.
    pub(crate) fn exact_norm(&self) -> Option<&ExactNorm> {
        self.layers.first()?.norm.as_ref()
    }

    /// Runs the model on several tensors, for lists that begin or end with a layer over several tensors.
    ///
    /// # Panics
    ///
    /// When a layer panics, or receives another number of tensors than it takes.
    pub fn forward_many(&self, values: &[Tensor], train: bool) -> Vec<Tensor> {
        let values = values.iter().map(Tensor::shallow_clone).collect();
        self.run(values, &mut Stashed::default(), train, |_| {})
    }

    /// Runs the model with the random numbers that a pipeline draws for one micro-batch of one step,
    /// independent of other draws in this program.
    ///
    /// # Panics
    /// As [`Model::forward_many`].
    pub fn forward_with_rng(&self, values: &[Tensor], train: bool, rng: StepRng) -> Vec<Tensor> {
        let generator = Generator::new(values.first().map_or(Device::Cpu, Tensor::device));
        let values = values.iter().map(Tensor::shallow_clone).collect();
        let before = |position| generator.seed(rng.seed(position));
        self.run(values, &mut Stashed::default(), train, before)
    }

    /// Runs the layers, with the stashes of earlier parts of the model. Calls `before` with each layer's
    /// position in the whole model before it runs.
    pub(crate) fn run(
        &self,
        mut values: Vec<Tensor>,
        stashed: &mut Stashed,
        train: bool,
        mut before: impl FnMut(usize),
    ) -> Vec<Tensor> {
        for (position, layer) in (self.first..).zip(&self.layers) {
            before(position);
            // Frees each layer's input as soon as its output exists.
            values = layer.run(position, values, stashed, train);
        }
        values
    }
}

impl Layer {
    fn run(
        &self,
        position: usize,
        values: Vec<Tensor>,
        stashed: &mut Stashed,
        train: bool,
    ) -> Vec<Tensor> {
        match &self.module {
            Module::One(module) => vec![module.forward_t(one(&values), train)],
            Module::Many(function) => function(&values, train),
            Module::Stash => {
                stashed.put(position, values.iter().map(Tensor::shallow_clone).collect());
                values
            }
            Module::Pop(function) => {
                let Popped { stash, last } =
                    self.popped.expect("each pop was paired with its stash");
                let skip = if last { stashed.take(stash) } else { stashed.share(stash) };
                function(&values, &skip.unwrap_or_else(|| self.missing(stash)), train)
            }
        }
    }

    fn missing(&self, stash: usize) -> ! {
        panic!(
            "layer '{}' pops what layer {stash} stashes, which is not in this part of the model: \
             run the parts in a pipeline",
            self.name
        )
    }
}

impl ModuleT for Model {
    fn forward_t(&self, x: &Tensor, train: bool) -> Tensor {
        let values = vec![x.shallow_clone()];
        let mut values = self.run(values, &mut Stashed::default(), train, |_| {});
        one(&values);
        values.swap_remove(0)
    }
}

/// Returns the only tensor.
pub(super) fn one(values: &[Tensor]) -> &Tensor {
    match values {
        [only] => only,
        _ => panic!("{} tensors came where one was expected: see `add_many`", values.len()),
    }
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(module) => module.fmt(f),
            Self::Many(_) => f.write_str("function of many"),
            Self::Stash => f.write_str("stash"),
            Self::Pop(_) => f.write_str("pop"),
        }
    }
}
