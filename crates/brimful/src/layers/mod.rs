//! A model as a list of named layers, each built only when and where it will live.
//!
//! A [`Layers`] is a description: it holds no tensor, can be shared between threads and built many
//! times. [`Layers::build`] makes the whole model in one place, [`Layers::build_range`] a stage's
//! part of it, so that a model too large for any device never has to exist on one.
//!
//! ```
//! use brimful::Layers;
//! use tch::nn::ModuleT;
//! use tch::{Device, Kind, Tensor, nn};
//!
//! let layers = Layers::new()
//!     .add("hidden", |p| nn::linear(p, 4, 8, Default::default()))
//!     .add_fn("relu", |x| x.relu())
//!     .add("output", |p| nn::linear(p, 8, 2, Default::default()));
//! assert_eq!(layers.parameter_count()?, (4 * 8 + 8) + (8 * 2 + 2));
//!
//! let vs = nn::VarStore::new(Device::Cpu);
//! let model = layers.build(&vs.root())?;
//! let out = model.forward_t(&Tensor::ones([3, 4], (Kind::Float, Device::Cpu)), true);
//! assert_eq!(out.size(), [3, 2]);
//! # Ok::<(), brimful::Error>(())
//! ```

mod model;
mod names;
#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use brimful_torch::meta;
use tch::nn::{ModuleT, Path, VarStore};
use tch::{Device, TchError, Tensor};

use crate::oom::{self, Caught};
use crate::{Error, Result};
pub use model::Model;
use model::{Function, Layer};

/// Builds a layer under its own path; the second path is that of the layer whose variables it
/// shares, and the layer's own where it shares none.
type Build = dyn Fn(&Path, &Path) -> Box<dyn ModuleT> + Send + Sync;

/// One line of the list.
#[derive(Clone)]
struct Description {
    name: String,
    /// The layer whose variables this one uses too.
    shares: Option<String>,
    build: Arc<Build>,
}

/// A model as a list of named layers.
///
/// A layer's variables are saved under its name, whatever else is in the list and however it is
/// split. So names must be there and differ; [`Layers::build`] and its kin say which do not.
#[derive(Clone, Default)]
pub struct Layers {
    list: Vec<Description>,
}

impl Layers {
    /// A list without layers, which gives what it is given.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a module, which `build` makes under the layer's own path. Any module of tch fits.
    #[must_use]
    pub fn add<M, F>(self, name: impl Into<String>, build: F) -> Self
    where
        M: ModuleT + 'static,
        F: Fn(&Path) -> M + Send + Sync + 'static,
    {
        self.push(name.into(), None, move |own, _| Box::new(build(own)))
    }

    /// Appends a module that uses variables of the earlier layer `with` too, as a GPT's head uses
    /// the table of its embedding.
    ///
    /// `build` gets the layer's own path and the other layer's. What it finds under the second one
    /// it takes (`Path::get`); what it does not find it makes there, because in a pipeline the
    /// other layer may live on another device.
    #[must_use]
    pub fn add_sharing<M, F>(
        self,
        name: impl Into<String>,
        with: impl Into<String>,
        build: F,
    ) -> Self
    where
        M: ModuleT + 'static,
        F: Fn(&Path, &Path) -> M + Send + Sync + 'static,
    {
        self.push(name.into(), Some(with.into()), move |own, other| Box::new(build(own, other)))
    }

    /// Appends a function. It must leave its input as it is.
    #[must_use]
    pub fn add_fn<F>(self, name: impl Into<String>, function: F) -> Self
    where
        F: Fn(&Tensor) -> Tensor + Send + Sync + 'static,
    {
        self.add_fn_t(name, move |x, _| function(x))
    }

    /// Appends a function that is also told whether it is training.
    #[must_use]
    pub fn add_fn_t<F>(self, name: impl Into<String>, function: F) -> Self
    where
        F: Fn(&Tensor, bool) -> Tensor + Send + Sync + 'static,
    {
        let function = Function(Arc::new(function));
        self.push(name.into(), None, move |_, _| Box::new(function.clone()))
    }

    /// Appends all layers of another list, each named `name.its own name`.
    #[must_use]
    pub fn add_layers(mut self, name: impl Into<String>, inner: Layers) -> Self {
        let name = name.into();
        self.list.extend(inner.list.into_iter().map(|layer| layer.inside(&name)));
        self
    }

    /// How many layers there are.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Whether there is no layer.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The layers' names, in order.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.list.iter().map(|layer| layer.name.as_str())
    }

    /// The pairs of layers that share variables, each as (user, owner), by position.
    ///
    /// # Errors
    /// As [`Layers::check`].
    pub fn shared(&self) -> Result<Vec<(usize, usize)>> {
        names::check(&self.list)?;
        Ok(names::shared(&self.list))
    }

    /// Whether every name is there, differs from the others and, if it is the name of a layer to
    /// share with, comes earlier in the list.
    ///
    /// # Errors
    /// The first name that is wrong, with its position and the one that it clashes with.
    pub fn check(&self) -> Result<()> {
        names::check(&self.list)
    }

    /// Builds the whole model under this path.
    ///
    /// # Errors
    /// As [`Layers::check`]; and when memory runs out, or the building of a layer panics otherwise.
    /// What was built before remains in the variable store.
    pub fn build(&self, root: &Path) -> Result<Model> {
        self.build_range(root, 0..self.len())
    }

    /// Builds the layers of this range under the path of the whole model: a stage's part.
    ///
    /// # Errors
    /// As [`Layers::build`], and when the range is not one of this list.
    pub fn build_range(&self, root: &Path, range: Range<usize>) -> Result<Model> {
        self.check()?;
        let Range { start, end } = range;
        let list = self.list.get(range).ok_or(Error::LayerRange { start, end, len: self.len() })?;
        list.iter().map(|layer| layer.build(root)).collect::<Result<_>>().map(Model::new)
    }

    /// How many numbers the model trains. Nothing is allocated to find out.
    ///
    /// # Errors
    /// As [`Layers::build`].
    pub fn parameter_count(&self) -> Result<u64> {
        Ok(self.parameter_counts()?.iter().sum())
    }

    /// How many numbers each layer trains; shared ones are counted with their owner.
    ///
    /// # Errors
    /// As [`Layers::build`].
    pub fn parameter_counts(&self) -> Result<Vec<u64>> {
        self.check()?;
        let _shapes_alone = meta::enter();
        let vs = VarStore::new(Device::Cpu);
        let mut before = 0;
        let count = |layer: &Description| {
            layer.build(&vs.root())?;
            let now = trainable(&vs);
            Ok(now - std::mem::replace(&mut before, now))
        };
        self.list.iter().map(count).collect()
    }

    fn push<F>(mut self, name: String, shares: Option<String>, build: F) -> Self
    where
        F: Fn(&Path, &Path) -> Box<dyn ModuleT> + Send + Sync + 'static,
    {
        self.list.push(Description { name, shares, build: Arc::new(build) });
        self
    }
}

impl fmt::Debug for Layers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.names()).finish()
    }
}

impl Description {
    fn inside(self, outer: &str) -> Self {
        let within = |name: String| format!("{outer}.{name}");
        Self { name: within(self.name), shares: self.shares.map(within), ..self }
    }

    fn build(&self, root: &Path) -> Result<Layer> {
        let other = self.shares.as_ref().unwrap_or(&self.name);
        let (own, other) = (descend(root, &self.name), descend(root, other));
        let built = oom::catch(|| Ok::<_, TchError>((self.build)(&own, &other)));
        let module = built.map_err(|caught| self.failed(caught))?;
        Ok(Layer { name: self.name.clone(), module })
    }

    /// Out of memory stays what it is; any other end gets the layer's name.
    fn failed(&self, caught: Caught<TchError>) -> Error {
        let message = match caught {
            Caught::OutOfMemory(oom) => return oom.into(),
            Caught::Error(error) => error.to_string(),
            Caught::Panic(payload) => oom::panic_text(&*payload).unwrap_or("a panic").to_owned(),
        };
        Error::LayerBuild { layer: self.name.clone(), message }
    }
}

/// The path of a joined name, one step a component, because tch allows no '.' in a step.
fn descend<'a>(root: &Path<'a>, name: &str) -> Path<'a> {
    name.split('.').fold(root.clone(), |path, step| path / step)
}

fn trainable(vs: &VarStore) -> u64 {
    vs.trainable_variables().iter().map(|variable| variable.numel() as u64).sum()
}
