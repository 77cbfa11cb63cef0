//! Builds the layers of a list on their device, all of them or a range, or only counts their parameters.

use std::collections::BTreeMap;
use std::ops::Range;

use brimful_torch::meta;
use tch::Device;
use tch::nn::{Path, VarStore};

use super::description::Description;
use super::{Layers, LayersError, Model};
use crate::Result;
use crate::random::{Generator, StepRng, preserving_generators};

impl Layers {
    /// Builds the whole model under this path.
    ///
    /// # Errors
    ///
    /// As [`Layers::check`]; and when memory runs out, or a layer's builder panics. Layers that were built before
    /// the failure remain in the variable store.
    pub fn build(&self, root: &Path) -> Result<Model> {
        self.build_range(root, 0..self.len())
    }

    /// Builds the layers of this range, such as a stage, under the path of the whole model.
    ///
    /// # Errors
    ///
    /// As [`Layers::build`], and when the range is outside this list.
    pub fn build_range(&self, root: &Path, range: Range<usize>) -> Result<Model> {
        self.build_range_watched(root, range, |_| {})
    }

    /// Builds as [`Layers::build_range`], but each layer draws its initial values from a seed of its own, as in
    /// a pipeline. So they depend neither on the range nor on the device.
    ///
    /// ```
    /// use brimful::{StepRng, Layers, Pipeline};
    /// use tch::{Device, nn};
    ///
    /// let layers = Layers::new()
    ///     .add("hidden", |p| nn::linear(p, 4, 8, Default::default()))
    ///     .add("output", |p| nn::linear(p, 8, 2, Default::default()));
    /// let store = nn::VarStore::new(Device::Cpu);
    /// tch::manual_seed(1);
    /// layers.build_range_with_rng(&store.root(), 0..2, StepRng::of_first_values()?)?;
    /// tch::manual_seed(1);
    /// let pipe = Pipeline::builder(layers).devices([Device::Cpu, Device::Cpu]).build()?;
    /// for (name, variable) in pipe.variables()? {
    ///     assert_eq!(variable, store.variables()[&name]);
    /// }
    /// # Ok::<(), brimful::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Layers::build_range`].
    pub fn build_range_with_rng(
        &self,
        root: &Path,
        range: Range<usize>,
        rng: StepRng,
    ) -> Result<Model> {
        let device = root.device();
        preserving_generators(vec![device], || {
            let generator = Generator::new(device);
            self.build_range_watched(root, range, |position| generator.seed(rng.seed(position)))
        })
    }

    /// Builds as [`Layers::build_range`]; calls `before` with each layer's position before it is built.
    pub(crate) fn build_range_watched(
        &self,
        root: &Path,
        range: Range<usize>,
        mut before: impl FnMut(usize),
    ) -> Result<Model> {
        let skips = self.paired_skips()?;
        let Range { start, end } = range;
        let list =
            self.list.get(range).ok_or(LayersError::Range { start, end, len: self.len() })?;
        let build = |(position, layer): (usize, &Description)| {
            before(position);
            layer.build(root, position, &skips)
        };
        let layers = (start..).zip(list).map(build).collect::<Result<_>>()?;
        Ok(Model::new(start, layers))
    }

    /// Returns the positions of the exact BatchNorms. Allocates no tensors.
    pub(crate) fn exact_norms(&self) -> Result<Vec<usize>> {
        let skips = self.paired_skips()?;
        let _shapes_alone = meta::enter();
        let vs = VarStore::new(Device::Cpu);
        let mut found = Vec::new();
        for (position, layer) in self.list.iter().enumerate().filter(|(_, layer)| layer.normalises)
        {
            if layer.build(&vs.root(), position, &skips)?.norm.is_some() {
                found.push(position);
            }
        }
        Ok(found)
    }

    /// Returns the number of parameters that the model trains. Allocates no tensors.
    ///
    /// # Errors
    /// As [`Layers::build`].
    pub fn parameter_count(&self) -> Result<u64> {
        Ok(self.parameter_counts()?.iter().sum())
    }

    /// Returns all variables by name, with their shapes. Allocates no tensors.
    ///
    /// # Errors
    /// As [`Layers::build`].
    pub fn variable_shapes(&self) -> Result<BTreeMap<String, Vec<i64>>> {
        let _shapes_alone = meta::enter();
        let vs = VarStore::new(Device::Cpu);
        self.build(&vs.root())?;
        Ok(vs.variables().into_iter().map(|(name, tensor)| (name, tensor.size())).collect())
    }

    /// Returns the number of parameters that each layer trains; shared ones count for their owner.
    ///
    /// # Errors
    /// As [`Layers::build`].
    pub fn parameter_counts(&self) -> Result<Vec<u64>> {
        let skips = self.paired_skips()?;
        let _shapes_alone = meta::enter();
        let vs = VarStore::new(Device::Cpu);
        let mut before = 0;
        let count = |(position, layer): (usize, &Description)| {
            layer.build(&vs.root(), position, &skips)?;
            let trainable = vs.trainable_variables();
            let now = trainable.iter().map(|variable| variable.numel() as u64).sum();
            Ok(now - std::mem::replace(&mut before, now))
        };
        self.list.iter().enumerate().map(count).collect()
    }

    /// Returns the number of trained parameters that each layer uses: shared ones count for every layer that uses
    /// them.
    ///
    /// # Errors
    /// As [`Layers::build`].
    pub fn parameters_used(&self) -> Result<Vec<u64>> {
        let mut counts = self.parameter_counts()?;
        for (user, owner) in self.shared()? {
            counts[user] += counts[owner];
        }
        Ok(counts)
    }
}
