//! Layers in a dtype: each is converted as soon as it is built.

use std::sync::Arc;

use tch::Kind;
use tch::nn::Path;

use super::Layers;
use super::description::Description;
use crate::nn::in_kind;

impl Layers {
    /// Builds these layers with floating-point variables of this dtype.
    ///
    /// Initial values are drawn in the store's dtype, which is f32 by default, and rounded. A
    /// [`spread_weight`](crate::nn::spread_weight), such as a [`Projection`](crate::nn::Projection)'s, is rounded
    /// 4,194,304 values at a time, any other variable when its layer is built. So the whole model never exists in
    /// f32. With `VarStore::set_kind`, it would exist in f32 first.
    ///
    /// ```
    /// use brimful::Layers;
    /// use tch::{Device, Kind, nn};
    ///
    /// let layers = Layers::new().add("fc", |p| nn::linear(p, 8, 4, Default::default()));
    /// let store = nn::VarStore::new(Device::Cpu);
    /// layers.kind(Kind::BFloat16).build(&store.root())?;
    /// assert!(store.variables().values().all(|variable| variable.kind() == Kind::BFloat16));
    /// # Ok::<(), brimful::Error>(())
    /// ```
    #[must_use]
    pub fn kind(self, kind: Kind) -> Self {
        let converted = |layer: Description| {
            let build = layer.build;
            let build = Arc::new(move |own: &Path, other: &Path| {
                let module = {
                    let _in_its_dtype = in_kind(kind);
                    build(own, other)
                };
                [own, other].into_iter().for_each(|path| convert(&mut path.clone(), kind));
                module
            });
            Description { build, ..layer }
        };
        Self { list: self.list.into_iter().map(converted).collect() }
    }
}

/// Converts the floating-point variables under a path.
fn convert(path: &mut Path, kind: Kind) {
    match kind {
        Kind::BFloat16 => path.bfloat16(),
        Kind::Half => path.half(),
        Kind::Double => path.double(),
        Kind::Float => path.float(),
        other => path.set_kind(other),
    }
}
