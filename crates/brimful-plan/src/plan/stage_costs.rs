//! Converts a profile of layers into costs of stages.

use std::ops::Range;

use crate::balance::{Balance, LayerCost, Load, SharedParameters, peak_of_both};
use crate::schedule::{Costs, DeviceId, Recompute, StageCost};

use super::Request;

/// Half-precision gradients are converted to the sums' dtype in pieces of this size before they are added.
const PIECE_BYTES: u64 = 64 << 20;

/// Costs of a step in `m` micro-batches. Times use their mean size, bytes the largest.
#[derive(Debug)]
pub(super) struct StepCosts<'a> {
    request: &'a Request<'a>,
    mean_samples: f64,
    most_samples: u64,
    /// Whether there is a single micro-batch, whose gradients are the sums if their dtypes agree.
    is_whole: bool,
    /// Whether gradients are added to the sums after a stage's backward, by the request or because stages
    /// are offloaded.
    sums_apart: bool,
}

impl<'a> StepCosts<'a> {
    pub(super) fn new(request: &'a Request<'a>, m: usize) -> Self {
        let mean_samples = request.samples as f64 / m as f64;
        let most_samples = request.samples.div_ceil(m) as u64;
        let sums_apart = request.sums_apart;
        Self { request, mean_samples, most_samples, is_whole: m == 1, sums_apart }
    }

    /// Returns the costs for offloaded stages, which always add gradients to the sums after their backward.
    pub(super) fn with_offload(self) -> Self {
        Self { sums_apart: true, ..self }
    }

    /// Returns the load of each layer on its stage, for the balancer.
    pub(super) fn loads(&self, recompute: Recompute) -> Vec<Load> {
        // `ExceptLast` saves few recomputations, and none on most stages: it is balanced as `Always`.
        let runs_again = if recompute == Recompute::Never { 0.0 } else { 1.0 };
        let load = |layer: &LayerCost| {
            let cost = self.layer(layer, &(0..0));
            // Gradients of a micro-batch are freed before sums are cast, so only the larger of the two counts.
            let fresh = if self.sums_apart { cost.fresh_bytes } else { 0 };
            Load {
                time: cost.forward * (1.0 + runs_again) + cost.backward,
                bytes: cost
                    .parameter_bytes
                    .saturating_add(cost.gradient_bytes)
                    .saturating_add(cost.cast_bytes.max(fresh))
                    .saturating_add(cost.optimizer_bytes),
                activation_bytes: cost.activation_bytes,
                output_bytes: cost.output_bytes,
            }
        };
        self.request.profile.layers.iter().map(load).collect()
    }

    /// Returns the costs of the stages of a balance on these devices.
    pub(super) fn stages(&self, balance: &Balance, placement: &[DeviceId]) -> Costs {
        let stages = balance.ranges().zip(placement);
        let stage = |(range, device): (Range<usize>, &DeviceId)| {
            self.stage(range, self.request.devices[device.index()].speed)
        };
        Costs {
            stages: stages.map(stage).collect(),
            input_bytes: self.request.profile.input_bytes.saturating_mul(self.most_samples),
            update_in_backward: self.request.update_in_backward,
            link: self.request.link,
            host_link: self.request.host_link,
        }
    }

    fn stage(&self, range: Range<usize>, speed: f64) -> StageCost {
        let layers = self.request.profile.layers[range.clone()].iter();
        let layers = layers.map(|layer| self.layer(layer, &range));
        let mut sum = layers.reduce(|a, b| self.add(a, b)).unwrap_or_default();
        // The first stage's input needs no gradient: all of its backward is for the weights.
        if range.start == 0 {
            (sum.input_gradient, sum.weight_gradient) = (0.0, sum.backward);
            sum.split_bytes = None;
        }
        StageCost {
            converted_bytes: sum.converted_bytes.min(PIECE_BYTES),
            forward: sum.forward / speed,
            backward: sum.backward / speed,
            input_gradient: sum.input_gradient / speed,
            weight_gradient: sum.weight_gradient / speed,
            recompute: sum.recompute / speed,
            ..sum
        }
    }

    /// Returns the costs of one layer of a stage for one micro-batch, on a device of speed 1.
    fn layer(&self, layer: &LayerCost, stage: &Range<usize>) -> StageCost {
        let time = |each: f64| layer.overhead + each * self.mean_samples;
        let bytes = |each: u64| each.saturating_mul(self.most_samples);
        let without = |shared: Option<SharedParameters>| {
            layer.parameter_bytes.saturating_sub(shared.map_or(0, |shared| shared.bytes))
        };
        // Bytes of parameters that this layer adds: `used` to its stage, `own` to its device.
        let used = without(layer.shares.filter(|shared| stage.contains(&shared.layer)));
        let own = without(layer.shares.filter(|_| self.request.devices.len() == 1)).min(used);
        let times = |bytes: u64, each: f64| (bytes as f64 * each) as u64;
        let [used_trained, own_trained] =
            [used, own].map(|bytes| times(bytes, self.request.trained));
        let summed = times(used_trained, self.request.gradient_bytes);
        let sent = self.request.sent_gradient_bytes;
        let sent = sent.map_or(summed, |each| times(used_trained, each));
        // On a device, sums of another dtype than the parameters' are cast, and both copies need memory. Offloaded
        // sums keep their dtype.
        let is_cast = summed != used_trained;
        let state = times(own_trained, self.request.optimizer_bytes);
        let updated = own_trained.saturating_add(state);
        let in_backward = self.request.update_in_backward;
        let (input_gradient, weight_gradient) = layer.split_backward_of(self.mean_samples);
        StageCost {
            forward: time(layer.forward),
            backward: time(layer.backward),
            input_gradient,
            weight_gradient,
            recompute: time(layer.forward),
            parameter_bytes: own,
            gradient_bytes: summed,
            cast_bytes: if is_cast { own_trained } else { 0 },
            fresh_bytes: if is_cast || !self.is_whole { used_trained } else { 0 },
            converted_bytes: if is_cast && !self.is_whole { summed } else { 0 },
            optimizer_bytes: state.saturating_add(times(own_trained, self.request.kept_bytes)),
            activation_bytes: bytes(layer.activation_bytes),
            forward_peak: bytes(layer.forward_peak),
            backward_peak: bytes(layer.backward_peak),
            split_bytes: layer.split_bytes.map(bytes),
            output_bytes: bytes(layer.output_bytes),
            offloaded_bytes: own,
            fetched_bytes: used,
            sent_bytes: if in_backward { updated } else { sent },
            update_in_bytes: if in_backward { state } else { state.saturating_add(sent) },
            update_out_bytes: if in_backward { 0 } else { updated },
        }
    }

    /// Returns the costs of two consecutive runs of layers as one.
    fn add(&self, a: StageCost, b: StageCost) -> StageCost {
        let kept = a.activation_bytes;
        let fresh = if self.sums_apart { u64::saturating_add } else { u64::max };
        let is_known = a.split_bytes.or(b.split_bytes).is_some();
        let between = |cost: &StageCost| cost.split_bytes.unwrap_or(cost.activation_bytes);
        StageCost {
            forward: a.forward + b.forward,
            backward: a.backward + b.backward,
            input_gradient: a.input_gradient + b.input_gradient,
            weight_gradient: a.weight_gradient + b.weight_gradient,
            recompute: a.recompute + b.recompute,
            parameter_bytes: a.parameter_bytes.saturating_add(b.parameter_bytes),
            gradient_bytes: a.gradient_bytes.saturating_add(b.gradient_bytes),
            optimizer_bytes: a.optimizer_bytes.saturating_add(b.optimizer_bytes),
            cast_bytes: a.cast_bytes.saturating_add(b.cast_bytes),
            fresh_bytes: fresh(a.fresh_bytes, b.fresh_bytes),
            converted_bytes: a.converted_bytes.saturating_add(b.converted_bytes),
            activation_bytes: kept.saturating_add(b.activation_bytes),
            forward_peak: peak_of_both(a.forward_peak, kept, b.forward_peak),
            backward_peak: peak_of_both(a.backward_peak, kept, b.backward_peak),
            split_bytes: is_known.then(|| between(&a).saturating_add(between(&b))),
            output_bytes: b.output_bytes,
            offloaded_bytes: a.offloaded_bytes.saturating_add(b.offloaded_bytes),
            fetched_bytes: a.fetched_bytes.saturating_add(b.fetched_bytes),
            sent_bytes: a.sent_bytes.saturating_add(b.sent_bytes),
            update_in_bytes: a.update_in_bytes.saturating_add(b.update_in_bytes),
            update_out_bytes: a.update_out_bytes.saturating_add(b.update_out_bytes),
        }
    }
}
