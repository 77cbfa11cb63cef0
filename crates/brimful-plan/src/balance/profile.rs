//! Profile of a model: the measured costs of its layers.

use serde::{Deserialize, Serialize};

use super::BalanceError;
use crate::schedule::is_time;

/// Costs of a model's layers, in the order in which they run.
///
/// ```
/// # use brimful_plan::balance::Profile;
/// let profile: Profile = serde_json::from_str(r#"{
///     "input_bytes": 4096,
///     "layers": [
///         { "name": "stem", "forward": 0.001, "backward": 0.002, "output_bytes": 65536 },
///         { "name": "head", "forward": 0.002, "backward": 0.004 }
///     ]
/// }"#)?;
/// assert_eq!(profile.layers.len(), 2);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Bytes of one sample at the input of the model.
    #[serde(default)]
    pub input_bytes: u64,
    /// Costs of the layers.
    pub layers: Vec<LayerCost>,
}

/// Costs of one layer. Times are in seconds per sample; bytes are per sample where the field says so.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerCost {
    /// Name of the layer.
    pub name: String,
    /// Time of the forward of one sample.
    pub forward: f64,
    /// Time of the whole backward of one sample.
    pub backward: f64,
    /// Time of the input gradient of one sample; if not known, a transformer's share of the backward.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input_gradient: Option<f64>,
    /// Time of the weight gradient of one sample; if not known, the rest of the backward.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_gradient: Option<f64>,
    /// Time of each call that does not depend on the number of samples; it makes small micro-batches slow.
    /// A split backward divides it in the same ratio as the time of a sample.
    #[serde(default)]
    pub overhead: f64,
    /// Bytes of the parameters.
    #[serde(default)]
    pub parameter_bytes: u64,
    /// Bytes that the forward of one sample keeps for the backward: includes its output, excludes its
    /// input.
    #[serde(default)]
    pub activation_bytes: u64,
    /// Peak bytes of one sample during its forward, including those that it keeps; 0 if not known.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub forward_peak: u64,
    /// Peak bytes of one sample during its backward: activations, the gradients of output and input, and
    /// all else but gradients of parameters; 0 if not known.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub backward_peak: u64,
    /// Bytes that one sample holds between its input gradient and its weight gradient, including its input if the
    /// weight gradient needs that. If not known, as many as before the input gradient.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub split_bytes: Option<u64>,
    /// Bytes of one sample's output.
    #[serde(default)]
    pub output_bytes: u64,
    /// Parameters that it shares with an earlier layer, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shares: Option<SharedParameters>,
}

/// Parameters that two layers share: there is one copy if both are on one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedParameters {
    /// Number of the earlier layer.
    pub layer: usize,
    /// Bytes of the shared parameters.
    pub bytes: u64,
}

fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

/// Returns the peak bytes of two consecutive runs of layers from the peaks of each. While the second run
/// computes, the `kept` bytes of the first run are in use.
pub(crate) fn peak_of_both(first: u64, kept: u64, second: u64) -> u64 {
    first.max(kept.saturating_add(second))
}

/// Default times of a split backward as shares of the whole, measured with a GPT. For a ResNet they are
/// 0.68 and 0.48.
const INPUT_HALF: f64 = 0.57;
const WEIGHT_HALF: f64 = 0.45;

impl LayerCost {
    /// Returns the times of one sample's input gradient and weight gradient.
    #[must_use]
    pub fn split_backward(&self) -> (f64, f64) {
        let together = self.backward * (INPUT_HALF + WEIGHT_HALF);
        let rest = |half: f64| f64::max(together - half, 0.0);
        match (self.input_gradient, self.weight_gradient) {
            (Some(input), Some(weight)) => (input, weight),
            (Some(input), None) => (input, rest(input)),
            (None, Some(weight)) => (rest(weight), weight),
            (None, None) => (self.backward * INPUT_HALF, self.backward * WEIGHT_HALF),
        }
    }

    /// Returns the times of the input gradient and the weight gradient of `samples` samples, with their
    /// shares of the overhead.
    pub(crate) fn split_backward_of(&self, samples: f64) -> (f64, f64) {
        let (input, weight) = self.split_backward();
        let both = input + weight;
        // If the backward takes no time, the input gradient, which others wait for, has all of the
        // overhead.
        let share = if both > 0.0 { input / both } else { 1.0 };
        let overhead = (self.overhead * share, self.overhead * (1.0 - share));
        (overhead.0 + input * samples, overhead.1 + weight * samples)
    }

    /// Returns the costs of this layer and a loss of its outputs as one layer. The loss has no parameters,
    /// and no layer after it.
    #[must_use]
    pub fn with_loss(self, loss: &Self) -> Self {
        let both = |of: fn(&Self) -> f64| of(&self) + of(loss);
        let kept = self.activation_bytes;
        Self {
            forward: both(|layer| layer.forward),
            backward: both(|layer| layer.backward),
            input_gradient: Some(self.split_backward().0 + loss.backward),
            weight_gradient: Some(self.split_backward().1),
            overhead: both(|layer| layer.overhead),
            activation_bytes: kept.saturating_add(loss.activation_bytes),
            forward_peak: peak_of_both(self.forward_peak, kept, loss.forward_peak),
            backward_peak: peak_of_both(self.backward_peak, kept, loss.backward_peak),
            output_bytes: loss.output_bytes,
            ..self
        }
    }

    /// Returns whether input gradient and weight gradient together take at least as long as the whole
    /// backward, up to rounding.
    #[must_use]
    pub fn split_adds_up(&self) -> bool {
        /// One part in a million: the rounding error of a time written with seven digits.
        const ROUNDING: f64 = 1e-6;
        let (input, weight) = self.split_backward();
        self.backward - (input + weight) <= ROUNDING * self.backward
    }

    fn times(&self) -> [(&'static str, f64); 5] {
        let (input, weight) = self.split_backward();
        [
            ("forward", self.forward),
            ("backward", self.backward),
            ("input gradient", input),
            ("weight gradient", weight),
            ("overhead", self.overhead),
        ]
    }
}

impl Profile {
    /// Checks that every time is valid, and that no backward is longer than its input and weight gradient
    /// together.
    ///
    /// # Errors
    /// If a layer has a negative or non-finite time, or a split backward that is shorter than the whole
    /// one. The error names the first such layer.
    pub fn check(&self) -> Result<(), BalanceError> {
        for (layer, costs) in self.layers.iter().enumerate() {
            for (what, value) in costs.times() {
                if !is_time(value) {
                    return Err(BalanceError::BadTime { layer, what, value });
                }
            }
            if !costs.split_adds_up() {
                let (input_gradient, weight_gradient) = costs.split_backward();
                let backward = costs.backward;
                return Err(BalanceError::BadSplit {
                    layer,
                    backward,
                    input_gradient,
                    weight_gradient,
                });
            }
        }
        Ok(())
    }
}
