//! Measures the times and sizes of layers one at a time, so that the whole model never exists.

mod layer;
mod meter;

use brimful_plan::balance::{LayerCost, Profile, SharedParameters};
use brimful_torch::autograd::backward;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use crate::batch::{self, Batch, copy_of, tensor_bytes};
use crate::layers::{Layers, Stashed};
use crate::random::Randomness;
use crate::{Error, Result};
use layer::{LayerTimes, MeasuredLayer};
use meter::Meter;

/// Measures the layers of a model in training, on this device, with this batch.
///
/// Each layer is built, run and freed before the next one, so a model larger than the device can be
/// measured on it. The state of the random generators is restored afterwards.
///
/// A layer that is [like the one before it](Layers::like_before) is not run: it gets the previous layer's costs.
///
/// Times are measured with the whole batch and, from 8 samples on, with a quarter of it, which separates
/// the overhead of a call from the time of a sample. A layer that shares another's variables is measured
/// with its own copy of them, as it has on another device.
///
/// ```
/// use brimful::{Layers, balance};
/// use tch::{Device, Kind, Tensor, nn};
///
/// let layers = Layers::new()
///     .add("hidden", |p| nn::linear(p, 4, 8, Default::default()))
///     .add_fn("relu", |x| x.relu());
/// let batch = Tensor::ones([16, 4], (Kind::Float, Device::Cpu));
/// let profile = balance::measure(&layers, Device::Cpu, &batch)?;
/// assert_eq!(profile.layers[0].parameter_bytes, (4 * 8 + 8) * 4);
/// assert_eq!(profile.layers[1].output_bytes, 8 * 4);
/// # Ok::<(), brimful::Error>(())
/// ```
///
/// # Errors
/// When the batch has no samples, the device is missing, or a layer cannot be built or run; the error names
/// the layer.
pub fn measure(layers: &Layers, device: Device, batch: &impl Batch) -> Result<Profile> {
    let tensors = batch::tensors(batch);
    let floating = tensors.iter().find(|value| value.is_floating_point());
    let kind = floating.map_or(Kind::Float, |value| value.kind());
    measure_of_kind(layers, device, batch, kind, |_| {})
}

/// Measures as [`measure`] does, with parameters and floating-point inputs of this dtype, for batches of tokens,
/// which do not determine the dtype. Calls `watch` with each layer as soon as it is measured.
///
/// # Errors
/// As for [`measure`].
pub fn measure_of_kind(
    layers: &Layers,
    device: Device,
    batch: &impl Batch,
    kind: Kind,
    watch: impl FnMut(&LayerCost),
) -> Result<Profile> {
    let values: Vec<Tensor> =
        batch::tensors(batch).into_iter().map(Tensor::shallow_clone).collect();
    let meter = Meter::of(device)?;
    let measurement = Measurement { meter, samples: batch::len(batch)? as i64, kind };
    let layers = match kind {
        Kind::Float => layers.clone(),
        kind => layers.clone().kind(kind),
    };
    let random = Randomness::now(device)?;
    let profile = tch::with_grad(|| measurement.profile(&layers, &values, watch));
    random.restore()?;
    profile
}

/// Device, batch size and dtype of a measurement.
struct Measurement {
    meter: Meter,
    /// Number of samples in the batch.
    samples: i64,
    /// Dtype of the parameters.
    kind: Kind,
}

impl Measurement {
    fn profile(
        &self,
        layers: &Layers,
        batch: &[Tensor],
        mut watch: impl FnMut(&LayerCost),
    ) -> Result<Profile> {
        let _counted = self.meter.memory.enter();
        begin_backwards(self.meter.device)?;
        // A copy, because a layer may change its input; in the parameters' dtype, because samples often
        // have another.
        let here = |value: &Tensor| {
            let copy = copy_of(&value.f_detach()?)?.f_to_device(self.meter.device)?;
            Ok(if copy.is_floating_point() { copy.f_to_kind(self.kind)? } else { copy })
        };
        let mut input = batch.iter().map(here).collect::<Result<Vec<_>>>()?;
        let mut stashed = Stashed::default();
        let mut profile = Profile { input_bytes: self.bytes_of(&input), layers: Vec::new() };
        let (owners, own) = (layers.shared()?, layers.parameter_counts()?);
        for (position, name) in layers.names().enumerate() {
            if let Some(before) = profile.layers.last().filter(|_| layers.is_alike(position)) {
                // Its output has the shape of its input, which is known.
                let layer = LayerCost { name: name.to_owned(), ..before.clone() };
                watch(&layer);
                profile.layers.push(layer);
                continue;
            }
            let measured = self.layer(layers, position, &input, stashed);
            let (layer, output, kept) = measured.map_err(|error| named(error, name))?;
            let owner = owners.iter().find(|(user, _)| *user == position);
            let shares = owner.map(|(_, owner)| {
                let own = own[position] * self.kind.elt_size_in_bytes() as u64;
                SharedParameters { layer: *owner, bytes: layer.parameter_bytes.saturating_sub(own) }
            });
            let layer = LayerCost { shares, ..layer };
            watch(&layer);
            profile.layers.push(layer);
            (input, stashed) = (output, kept);
        }
        Ok(profile)
    }

    /// Returns a layer's costs, its output as the next one's input, and the tensors stashed for later
    /// layers.
    fn layer(
        &self,
        layers: &Layers,
        position: usize,
        input: &[Tensor],
        stashed: Stashed,
    ) -> Result<(LayerCost, Vec<Tensor>, Stashed)> {
        let store = VarStore::new(self.meter.device);
        let model = layers.build_range(&store.root(), position..position + 1)?;
        let name = model.names().next().unwrap_or_default().to_owned();
        let subject = MeasuredLayer {
            meter: &self.meter,
            samples: self.samples,
            name: &name,
            model: &model,
            parameters: store.trainable_variables(),
            stashed,
            is_first: position == 0,
        };
        let whole = subject.times(input, None)?;
        let peaks = subject.peaks(input)?;
        let (activation_bytes, output, stashed) = subject.kept(input)?;
        let layer = LayerCost {
            parameter_bytes: subject.parameters.iter().map(tensor_bytes).sum(),
            activation_bytes: self.per_sample(activation_bytes),
            forward_peak: self.per_sample(peaks.forward),
            backward_peak: self.per_sample(peaks.backward),
            split_bytes: subject.kept_between(input)?.map(|bytes| self.per_sample(bytes)),
            output_bytes: self.bytes_of(&output),
            ..self.costs(whole, subject.part_times(input)?)
        };
        Ok((LayerCost { name, ..layer }, output, stashed))
    }

    /// Returns the times of a sample and the overhead of a call. Forward and backward both get the mean of their
    /// two overheads, so that the sum of their times is as measured. The two parts of a split backward share the
    /// overhead of a backward.
    fn costs(&self, whole: LayerTimes, part: Option<(i64, LayerTimes)>) -> LayerCost {
        let n = self.samples as f64;
        let fixed = |whole: f64, few: i64, part: f64| {
            let each = f64::max(whole - part, 0.0) / (n - few as f64);
            f64::max(whole - n * each, 0.0)
        };
        let overhead = part.map_or(0.0, |(few, part)| {
            let forward = fixed(whole.forward, few, part.forward);
            f64::midpoint(forward, fixed(whole.backward, few, part.backward))
        });
        let each = |time: f64| f64::max(time - overhead, 0.0) / n;
        // A split backward is never faster than a whole one: if the measured times say so, the clock is
        // inaccurate.
        let (input, weight) = match (whole.input_gradient, whole.weight_gradient) {
            (input, 0.0) => (input.max(whole.backward), 0.0),
            (input, weight) => (input, weight.max(whole.backward - input)),
        };
        let split = input + weight;
        let share = |half: f64| if split > 0.0 { each(split) * half / split } else { 0.0 };
        LayerCost {
            forward: each(whole.forward),
            backward: each(whole.backward),
            input_gradient: Some(share(input)),
            weight_gradient: Some(share(weight)),
            overhead,
            ..LayerCost::default()
        }
    }

    fn bytes_of(&self, values: &[Tensor]) -> u64 {
        self.per_sample(values.iter().map(tensor_bytes).sum())
    }

    fn per_sample(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.samples as u64)
    }
}

/// Runs a small operation on libtorch's backward thread of an accelerator. If the thread's first operation were a
/// matrix product, libtorch would print a warning to standard error.
fn begin_backwards(device: Device) -> Result<()> {
    if device == Device::Cpu {
        return Ok(());
    }
    let x = Tensor::f_ones([1_i64], (Kind::Float, device))?.f_set_requires_grad(true)?;
    Ok(backward(&[&x.f_neg()?], &[Some(&x.f_detach()?)], false)?)
}

/// Adds the layer's name to errors that lack it.
fn named(error: Error, layer: &str) -> Error {
    match error {
        Error::OutOfMemory(mut oom) => {
            oom.message =
                format!("layer '{layer}' was measured when memory ran out: {}", oom.message);
            Error::OutOfMemory(oom)
        }
        Error::Torch(message) => Error::Torch(format!("layer '{layer}': {message}")),
        other => other,
    }
}
