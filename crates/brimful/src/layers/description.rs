//! Entry of the list: a layer's name, its shared variables, and its builder.

use std::sync::Arc;

use brimful_torch::meta;
use tch::nn::{Path, VarStore};
use tch::{Device, TchError};

use super::LayersError;
use super::model::{Layer, Module, Popped};
use super::skips::{Name, Skip};
use crate::oom::{self, Caught};
use crate::{Error, Result, nn};

/// Function that builds a layer under its own path. The second path is that of the layer whose variables it
/// shares, or its own path if it shares none.
pub(super) type Build = dyn Fn(&Path, &Path) -> Module + Send + Sync;

/// Entry of the list.
#[derive(Clone)]
pub(super) struct Description {
    pub(super) name: String,
    /// Layer whose variables this one shares.
    pub(super) shares: Option<String>,
    /// True if the layer was added as a normalisation, so that it may contain an exact BatchNorm.
    pub(super) normalises: bool,
    /// True if the layer stashes its input for later layers.
    pub(super) stashes: bool,
    /// True if the layer computes the same function as the previous layer, with other weights.
    pub(super) is_alike: bool,
    /// Skip that the layer pops, besides its input.
    pub(super) pops: Option<Name>,
    pub(super) build: Arc<Build>,
}

impl Description {
    pub(super) fn inside(self, outer: &str) -> Self {
        let within = |name: String| format!("{outer}.{name}");
        Self {
            name: within(self.name),
            shares: self.shares.map(within),
            pops: self.pops.map(|skip| skip.inside(outer)),
            ..self
        }
    }

    /// Builds the layer at this position of a list with these skips.
    pub(super) fn build(&self, root: &Path, position: usize, skips: &[Skip]) -> Result<Layer> {
        let (mut norms, module) = match self.normalises {
            true => nn::built_in(|| self.build_module(root)),
            false => (Vec::new(), self.build_module(root)),
        };
        if norms.len() > 1 {
            let (name, norms) = (self.name.clone(), norms.len());
            return Err(LayersError::ExactNorms { position, name, norms }.into());
        }
        let popped = skips.iter().find(|skip| skip.pops.contains(&position));
        let popped = popped
            .map(|skip| Popped { stash: skip.stash, last: skip.pops.last() == Some(&position) });
        Ok(Layer { name: self.name.clone(), module: module?, norm: norms.pop(), popped })
    }

    fn build_module(&self, root: &Path) -> Result<Module> {
        let other = self.shares.as_ref().unwrap_or(&self.name);
        let (own, other) = (descend(root, &self.name), descend(root, other));
        let built = oom::catch(|| Ok::<_, TchError>((self.build)(&own, &other)));
        built.map_err(|caught| self.failed(caught))
    }

    /// Passes out-of-memory on; adds the layer's name to any other failure.
    fn failed(&self, caught: Caught<TchError>) -> Error {
        let message = match caught {
            Caught::OutOfMemory(oom) => return oom.into(),
            Caught::Error(error) => Error::from(error).to_string(),
            Caught::Panic(payload) => {
                oom::panic_words(&*payload).unwrap_or_else(|| "a panic".to_owned())
            }
        };
        LayersError::Build { layer: self.name.clone(), message }.into()
    }
}

/// Returns the path of a dotted name, one component at a time, because tch allows no '.' in a component.
pub(super) fn descend<'a>(root: &Path<'a>, name: &str) -> Path<'a> {
    name.split('.').fold(root.clone(), |path, step| path / step)
}

/// Returns the names of the variables that a layer creates under its own path, and of those under the path of
/// the layer that it shares with. Allocates no tensors.
pub(super) fn variable_names(build: &Build) -> [Vec<String>; 2] {
    let _shapes_alone = meta::enter();
    let store = VarStore::new(Device::Cpu);
    // Catches the exact BatchNorms of this build, which is thrown away.
    let _norms = nn::built_in(|| build(&(store.root() / "own"), &(store.root() / "other")));
    let all = store.variables();
    ["own.", "other."].map(|path| {
        let under = all.keys().filter_map(|name| name.strip_prefix(path));
        under.map(str::to_owned).collect()
    })
}
