//! Layers with LoRA: their own variables are frozen, the adapters are trained.

use std::sync::Arc;

use tch::nn::Path;

use super::Layers;
use super::description::{Build, Description, descend, variable_names};
use super::model::Module;
use crate::nn::Lora;

impl Layers {
    /// Adds LoRA to the projections ([`Projection`](crate::nn::Projection)) of these layers. Only the adapters are
    /// trained, have gradients and optimizer state, and are copied back from a device.
    ///
    /// ```
    /// use brimful::Layers;
    /// use brimful::nn::{Lora, Projection, ProjectionConfig};
    /// use tch::{Device, nn};
    ///
    /// let config = ProjectionConfig { spread: 0.1, bias: true, inputs_first: false };
    /// let layers = Layers::new().add("fc", move |p| Projection::new(p, 8, 4, config));
    /// let store = nn::VarStore::new(Device::Cpu);
    /// layers.lora(&Lora::new(2)).build(&store.root())?;
    /// for (name, variable) in store.variables() {
    ///     assert_eq!(variable.requires_grad(), Lora::is_adapter(&name));
    /// }
    /// # Ok::<(), brimful::Error>(())
    /// ```
    #[must_use]
    pub fn lora(self, lora: &Lora) -> Self {
        let lora = Arc::new(lora.clone());
        let list = self.list.into_iter().map(|layer| adapted(layer, &lora));
        Self { list: list.collect() }
    }
}

fn adapted(layer: Description, lora: &Arc<Lora>) -> Description {
    let (build, lora) = (layer.build, Arc::clone(lora));
    let build = Arc::new(move |own: &Path, other: &Path| adapt(&*build, own, other, &lora));
    Description { build, ..layer }
}

/// Builds a layer with LoRA, and freezes all variables but the adapters'.
fn adapt(build: &Build, own: &Path, other: &Path, lora: &Arc<Lora>) -> Module {
    let module = {
        let _adapting = Lora::enter(lora);
        build(own, other)
    };
    for (path, names) in [own, other].into_iter().zip(variable_names(build)) {
        for name in names {
            if let Some(variable) = descended(path, &name) {
                let _itself = variable.set_requires_grad(false);
            }
        }
    }
    module
}

/// Returns the variable of this dotted name under the path.
fn descended(path: &Path, name: &str) -> Option<tch::Tensor> {
    match name.rsplit_once('.') {
        Some((layer, name)) => descend(path, layer).get(name),
        None => path.get(name),
    }
}
