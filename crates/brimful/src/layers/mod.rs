//! A model as a list of named layers, each built only when and where it is needed.
//!
//! A [`Layers`] is a description: it holds no tensor, can be shared between threads and built many times.
//! [`Layers::build`] builds the whole model on one device, [`Layers::build_range`] one stage of it, so that a
//! model too large for any device never has to exist on one.
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
//!
//! *Skip connections* are stashed at one position of the list and popped at one or more later ones, by name.
//! The names are local to their own list, so that all levels of a U-Net can use `skip`:
//!
//! ```
//! # use brimful::Layers;
//! # use tch::{Tensor, nn};
//! fn level(inner: Layers) -> Layers {
//!     Layers::new()
//!         .stash("skip")
//!         .add_fn("down", |x| x.max_pool2d_default(2))
//!         .add_layers("inner", inner)
//!         .add_fn("up", |x| x.upsample_nearest2d([8, 8], None, None))
//!         .pop("join", "skip", |x, skip| Tensor::cat(&[x, skip], 1))
//! }
//! let layers = level(level(Layers::new().add_fn("bottom", |x| x.relu())));
//! assert_eq!(layers.skips()?.len(), 2);
//! # Ok::<(), brimful::Error>(())
//! ```

mod adapted;
mod building;
mod description;
mod error;
mod kind;
mod model;
mod names;
mod skips;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;

use tch::Tensor;
use tch::nn::{self, ModuleT, Path};

use crate::Result;
use description::Description;
pub use error::LayersError;
pub use model::Model;
use model::Module;
pub(crate) use skips::Skip;
pub(crate) use skips::Stashed;

/// A model as a list of named layers.
///
/// A layer's variables are saved under its name, whatever else is in the list and however it is split. So every
/// layer needs a name of its own; [`Layers::build`] and [`Layers::check`] report missing and duplicate names.
#[derive(Clone, Default)]
pub struct Layers {
    list: Vec<Description>,
}

impl Layers {
    /// Creates an empty list, which returns its input.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a module, which `build` creates under the layer's own path. Any module of tch fits.
    #[must_use]
    pub fn add<M, F>(self, name: impl Into<String>, build: F) -> Self
    where
        M: ModuleT + 'static,
        F: Fn(&Path) -> M + Send + Sync + 'static,
    {
        self.push(name, move |own, _| Module::One(Box::new(build(own))))
    }

    /// Appends a module over several tensors: it receives all tensors of the layer before, one or more, and
    /// returns one or more.
    ///
    /// ```
    /// # use brimful::Layers;
    /// # use tch::Tensor;
    /// let layers = Layers::new()
    ///     .add_many("halves", |_| |x, _| x[0].chunk(2, 1))
    ///     .add_many("product", |_| |x, _| vec![&x[0] * &x[1]]);
    /// # layers.check()?;
    /// # Ok::<(), brimful::Error>(())
    /// ```
    #[must_use]
    pub fn add_many<M, F>(self, name: impl Into<String>, build: F) -> Self
    where
        M: Fn(&[Tensor], bool) -> Vec<Tensor> + Send + 'static,
        F: Fn(&Path) -> M + Send + Sync + 'static,
    {
        self.push(name, move |own, _| Module::Many(Box::new(build(own))))
    }

    /// Appends a normalisation: a [`BatchNorm`](crate::nn::BatchNorm), or a module that begins with one. It
    /// normalises its first input tensor, and passes others on unchanged.
    ///
    /// With [`BatchNormPolicy::Exact`](crate::nn::BatchNormPolicy::Exact) the layer is a barrier: a pipeline
    /// runs all micro-batches up to it before the first one continues. With any other policy it is like a layer
    /// of [`Layers::add`].
    ///
    /// ```
    /// use brimful::nn::{BatchNormConfig, BatchNormPolicy, batch_norm1d};
    /// use brimful::{Layers, Loss, Pipeline, MicroBatches};
    /// use tch::{Device, Kind, Tensor, nn};
    ///
    /// let exact = BatchNormConfig { policy: BatchNormPolicy::Exact, ..Default::default() };
    /// let layers = Layers::new()
    ///     .add("hidden", |p| nn::linear(p, 4, 8, Default::default()))
    ///     .add_norm("norm", move |p| batch_norm1d(p, 8, exact).with_relu())
    ///     .add("output", |p| nn::linear(p, 8, 3, Default::default()));
    /// let mut pipe = Pipeline::builder(layers).micro_batches(MicroBatches::Samples(2)).build()?;
    /// let x = Tensor::randn([16, 4], (Kind::Float, Device::Cpu));
    /// let y = Tensor::randint(3, [16], (Kind::Int64, Device::Cpu));
    /// pipe.backward(&x, &y, |out: Tensor, y| Loss::mean(out.cross_entropy_for_logits(y)))?;
    /// # Ok::<(), brimful::Error>(())
    /// ```
    #[must_use]
    pub fn add_norm<M, F>(self, name: impl Into<String>, build: F) -> Self
    where
        M: ModuleT + 'static,
        F: Fn(&Path) -> M + Send + Sync + 'static,
    {
        self.add_norm_many(name, move |own| {
            let module = build(own);
            move |x: &[Tensor], train: bool| with_first(x, |first| module.forward_t(first, train))
        })
    }

    /// Appends a normalisation over several tensors. It normalises the first one, to which it can also add a
    /// shortcut.
    ///
    /// ```
    /// # use brimful::Layers;
    /// # use brimful::nn::{BatchNormConfig, batch_norm1d};
    /// # use tch::nn::ModuleT;
    /// # use tch::{Device, Kind, Tensor, nn};
    /// let layers = Layers::new()
    ///     .add_many("pair", |_| |x, _| vec![x[0].shallow_clone(), x[0].shallow_clone()])
    ///     .add_norm_many("norm", |p| {
    ///         let norm = batch_norm1d(p, 4, BatchNormConfig::default());
    ///         move |x, train| vec![norm.forward_add_relu(&x[0], &x[1], train)]
    ///     });
    /// # let model = layers.build(&nn::VarStore::new(Device::Cpu).root())?;
    /// # model.forward_t(&Tensor::ones([2, 4], (Kind::Float, Device::Cpu)), true);
    /// # Ok::<(), brimful::Error>(())
    /// ```
    #[must_use]
    pub fn add_norm_many<M, F>(self, name: impl Into<String>, build: F) -> Self
    where
        M: Fn(&[Tensor], bool) -> Vec<Tensor> + Send + 'static,
        F: Fn(&Path) -> M + Send + Sync + 'static,
    {
        self.add_many(name, build).with_last(|last| last.normalises = true)
    }

    /// Appends a normalisation that also receives the tensors stashed under the name `skip`, as [`Layers::pop`]
    /// does. So a shortcut that is added after a normalisation goes straight to that layer, and the layers between
    /// need not pass the shortcut on.
    ///
    /// ```
    /// # use brimful::Layers;
    /// # use brimful::nn::{BatchNormConfig, batch_norm1d};
    /// # use tch::nn::ModuleT;
    /// # use tch::{Device, Kind, Tensor, nn};
    /// let layers = Layers::new()
    ///     .stash("entry")
    ///     .add("hidden", |p| nn::linear(p, 4, 4, Default::default()))
    ///     .pop_norm("norm", "entry", |p| {
    ///         let norm = batch_norm1d(p, 4, BatchNormConfig::default());
    ///         move |x, entry, train| norm.forward_add_relu(x, entry, train)
    ///     });
    /// # let model = layers.build(&nn::VarStore::new(Device::Cpu).root())?;
    /// # model.forward_t(&Tensor::ones([2, 4], (Kind::Float, Device::Cpu)), true);
    /// # Ok::<(), brimful::Error>(())
    /// ```
    #[must_use]
    pub fn pop_norm<M, F>(self, name: impl Into<String>, skip: impl Into<String>, build: F) -> Self
    where
        M: Fn(&Tensor, &Tensor, bool) -> Tensor + Send + 'static,
        F: Fn(&Path) -> M + Send + Sync + 'static,
    {
        let built = self.push(name, move |own, _| {
            let function = build(own);
            Module::Pop(Box::new(move |x, skip, train| {
                with_first(x, |first| function(first, model::one(skip), train))
            }))
        });
        built.popping(skip).with_last(|last| last.normalises = true)
    }

    /// Appends a module that shares variables of the earlier layer `with`, as a GPT's head shares the table of
    /// its embedding.
    ///
    /// `build` receives the layer's own path and the path of `with`. It takes existing variables from the second
    /// path (`Path::get`) and creates missing ones there, because in a pipeline `with` may be on another device.
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
        let built = self.push(name, move |own, other| Module::One(Box::new(build(own, other))));
        built.with_last(|last| last.shares = Some(with.into()))
    }

    /// Declares that the last layer computes the same function as the previous layer, with other weights, like the
    /// blocks of a transformer. A profile measures such layers once.
    ///
    /// ```
    /// # use brimful::{Layers, balance};
    /// # use tch::{Device, Kind, Tensor, nn};
    /// let layers = (0..12).fold(Layers::new(), |layers, number| {
    ///     let more = layers
    ///         .add(format!("block{number}"), |p| nn::linear(p, 8, 8, Default::default()));
    ///     if number == 0 { more } else { more.like_before() }
    /// });
    /// let batch = Tensor::ones([16, 8], (Kind::Float, Device::Cpu));
    /// let profile = balance::measure(&layers, Device::Cpu, &batch)?;
    /// assert_eq!(profile.layers[11].forward, profile.layers[0].forward);
    /// # Ok::<(), brimful::Error>(())
    /// ```
    #[must_use]
    pub fn like_before(self) -> Self {
        self.with_last(|last| last.is_alike = true)
    }

    /// Returns whether the layer at this position was added with [`Layers::like_before`].
    pub(crate) fn is_alike(&self, position: usize) -> bool {
        self.list.get(position).is_some_and(|layer| layer.is_alike)
    }

    /// Appends a function, which must not change its input.
    #[must_use]
    pub fn add_fn<F>(self, name: impl Into<String>, function: F) -> Self
    where
        F: Fn(&Tensor) -> Tensor + Send + Sync + 'static,
    {
        self.add_fn_t(name, move |x, _| function(x))
    }

    /// Appends a function whose second argument is true in training.
    #[must_use]
    pub fn add_fn_t<F>(self, name: impl Into<String>, function: F) -> Self
    where
        F: Fn(&Tensor, bool) -> Tensor + Send + Sync + 'static,
    {
        let function = Arc::new(function);
        self.push(name, move |_, _| {
            let function = Arc::clone(&function);
            Module::One(Box::new(nn::func_t(move |x, train| function(x, train))))
        })
    }

    /// Appends a layer that stashes its input under this name for every later layer that pops it, and returns the
    /// input unchanged.
    ///
    /// The stash is a layer of that name, and counts as a layer in the balance.
    #[must_use]
    pub fn stash(self, skip: impl Into<String>) -> Self {
        self.push(skip, |_, _| Module::Stash).with_last(|last| last.stashes = true)
    }

    /// Appends a function of its input and of the tensor stashed under the name `skip` in this list, or in one
    /// around it.
    #[must_use]
    pub fn pop<F>(self, name: impl Into<String>, skip: impl Into<String>, function: F) -> Self
    where
        F: Fn(&Tensor, &Tensor) -> Tensor + Send + Sync + 'static,
    {
        self.pop_many(name, skip, move |x, skip| vec![function(model::one(x), model::one(skip))])
    }

    /// Appends a function over several input tensors, stashed tensors or outputs.
    #[must_use]
    pub fn pop_many<F>(self, name: impl Into<String>, skip: impl Into<String>, function: F) -> Self
    where
        F: Fn(&[Tensor], &[Tensor]) -> Vec<Tensor> + Send + Sync + 'static,
    {
        let function = Arc::new(function);
        let built = self.push(name, move |_, _| {
            let function = Arc::clone(&function);
            Module::Pop(Box::new(move |x, skip, _| function(x, skip)))
        });
        built.popping(skip)
    }

    /// Appends all layers of another list. Their names, and those of their skips, get the prefix `name.`.
    #[must_use]
    pub fn add_layers(mut self, name: impl Into<String>, inner: Layers) -> Self {
        let name = name.into();
        self.list.extend(inner.list.into_iter().map(|layer| layer.inside(&name)));
        self
    }

    /// Returns the number of layers.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Returns whether there is no layer.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Returns the layers' names, in order.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.list.iter().map(|layer| layer.name.as_str())
    }

    /// Returns the pairs of layers that share variables, each as (user, owner), by position.
    ///
    /// # Errors
    /// As [`Layers::check`].
    pub fn shared(&self) -> Result<Vec<(usize, usize)>> {
        names::check(&self.list)?;
        Ok(names::shared(&self.list))
    }

    /// Returns the skip connections as pairs (stash, pop) of positions, in the order of the stashes.
    ///
    /// # Errors
    /// As [`Layers::check`].
    pub fn skips(&self) -> Result<Vec<(usize, usize)>> {
        let pops = |Skip { stash, pops }: Skip| pops.into_iter().map(move |pop| (stash, pop));
        Ok(self.paired_skips()?.into_iter().flat_map(pops).collect())
    }

    /// Returns the skip connections, each with all of its pops.
    pub(crate) fn paired_skips(&self) -> Result<Vec<Skip>> {
        names::check(&self.list)?;
        names::skips(&self.list)
    }

    /// Checks that every name is present and unique, that the names of shared layers and popped skips come
    /// earlier in the list, and that every stash is popped.
    ///
    /// # Errors
    ///
    /// When a name is wrong. The error has the first wrong name, its position, and the name with which it clashes.
    pub fn check(&self) -> Result<()> {
        self.paired_skips().map(drop)
    }

    fn push(
        mut self,
        name: impl Into<String>,
        build: impl Fn(&Path, &Path) -> Module + Send + Sync + 'static,
    ) -> Self {
        self.list.push(Description {
            name: name.into(),
            shares: None,
            normalises: false,
            stashes: false,
            is_alike: false,
            pops: None,
            build: Arc::new(build),
        });
        self
    }

    /// Makes the last layer pop this skip.
    fn popping(self, skip: impl Into<String>) -> Self {
        self.with_last(|last| last.pops = Some(skips::Name::new(skip.into())))
    }

    fn with_last(mut self, change: impl FnOnce(&mut Description)) -> Self {
        if let Some(last) = self.list.last_mut() {
            change(last);
        }
        self
    }
}

/// Replaces the first tensor by the result of `function`; the others stay as they are.
fn with_first(x: &[Tensor], function: impl FnOnce(&Tensor) -> Tensor) -> Vec<Tensor> {
    let Some((first, others)) = x.split_first() else { return Vec::new() };
    let others = others.iter().map(Tensor::shallow_clone);
    std::iter::once(function(first)).chain(others).collect()
}

impl fmt::Debug for Layers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.names()).finish()
    }
}
