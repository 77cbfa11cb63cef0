//! What each layer of a model costs, as it was measured.

use serde::{Deserialize, Serialize};

use super::BalanceError;
use crate::schedule::is_time;

/// The layers of a model, in the order in which they run.
///
/// ```
/// # use brimful_plan as brimful;
/// # use brimful::balance::Profile;
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
    /// Bytes of one sample at the entrance of the model.
    #[serde(default)]
    pub input_bytes: u64,
    /// The layers.
    pub layers: Vec<LayerCost>,
}

/// What one layer costs. Times are seconds a sample, bytes are of one sample where it says so.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerCost {
    /// The layer's own name.
    pub name: String,
    /// Time of the forward of one sample.
    pub forward: f64,
    /// Time of the whole backward of one sample.
    pub backward: f64,
    /// Time of the half of the backward that makes the gradient of the input; if not known, as much as
    /// it takes of a transformer's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input_gradient: Option<f64>,
    /// Time of the half of the backward that makes the gradients of the weights; if not known, what
    /// the other leaves of both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_gradient: Option<f64>,
    /// Time of each call, however few samples it has: what makes small micro-batches slow. The halves of
    /// a backward share it as they share the time of a sample.
    #[serde(default)]
    pub overhead: f64,
    /// Bytes of the parameters.
    #[serde(default)]
    pub parameter_bytes: u64,
    /// Bytes that the forward of one sample keeps for the backward: its output with them, its input
    /// without.
    #[serde(default)]
    pub activation_bytes: u64,
    /// The most bytes of one sample while its forward runs, those that it keeps among them; 0 where that is not
    /// known.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub forward_peak: u64,
    /// The most bytes of one sample while its backward runs: what the forward has kept, the gradients of output
    /// and input, and all else but gradients of parameters; 0 where that is not known.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub backward_peak: u64,
    /// Bytes that one sample holds between the halves of its backward: its input among them where the
    /// second half needs it. If not known, as many as before the first one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub split_bytes: Option<u64>,
    /// Bytes of one sample's output.
    #[serde(default)]
    pub output_bytes: u64,
    /// Which of its parameters an earlier layer has too, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shares: Option<SharedParameters>,
}

/// Parameters that two layers have: where both are on one device they are there once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedParameters {
    /// The number of the earlier layer.
    pub layer: usize,
    /// Their bytes.
    pub bytes: u64,
}

fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

/// The most bytes of two runs of layers as one, from the most of each: while the second computes, the first
/// one's `kept` bytes are there.
pub(crate) fn peak_of_both(first: u64, kept: u64, second: u64) -> u64 {
    first.max(kept.saturating_add(second))
}

/// What the halves of a split backward take of the whole where nothing else is known: measured with a
/// GPT. Of a ResNet it is 0.68 and 0.48.
const INPUT_HALF: f64 = 0.57;
const WEIGHT_HALF: f64 = 0.45;

impl LayerCost {
    /// The times of the two halves of the backward of one sample: input gradient, weight gradient.
    #[must_use]
    pub fn halves(&self) -> (f64, f64) {
        let together = self.backward * (INPUT_HALF + WEIGHT_HALF);
        let rest = |half: f64| f64::max(together - half, 0.0);
        match (self.input_gradient, self.weight_gradient) {
            (Some(input), Some(weight)) => (input, weight),
            (Some(input), None) => (input, rest(input)),
            (None, Some(weight)) => (rest(weight), weight),
            (None, None) => (self.backward * INPUT_HALF, self.backward * WEIGHT_HALF),
        }
    }

    /// The times of the two halves of the backward of so many samples, with their shares of the overhead.
    pub(crate) fn halves_of(&self, samples: f64) -> (f64, f64) {
        let (input, weight) = self.halves();
        let both = input + weight;
        // Of a backward that takes no time, the half that others wait for has it all.
        let share = if both > 0.0 { input / both } else { 1.0 };
        let overhead = (self.overhead * share, self.overhead * (1.0 - share));
        (overhead.0 + input * samples, overhead.1 + weight * samples)
    }

    /// This layer and a loss of its outputs as one. The loss has neither parameters nor anything behind it.
    #[must_use]
    pub fn with_loss(self, loss: &Self) -> Self {
        let both = |of: fn(&Self) -> f64| of(&self) + of(loss);
        let kept = self.activation_bytes;
        Self {
            forward: both(|layer| layer.forward),
            backward: both(|layer| layer.backward),
            input_gradient: Some(self.halves().0 + loss.backward),
            weight_gradient: Some(self.halves().1),
            overhead: both(|layer| layer.overhead),
            activation_bytes: kept.saturating_add(loss.activation_bytes),
            forward_peak: peak_of_both(self.forward_peak, kept, loss.forward_peak),
            backward_peak: peak_of_both(self.backward_peak, kept, loss.backward_peak),
            output_bytes: loss.output_bytes,
            ..self
        }
    }

    /// Whether the two halves take as long as the whole, or longer, but for rounding.
    #[must_use]
    pub fn halves_add_up(&self) -> bool {
        /// One part in a million: what is left of a time that was written with seven digits.
        const ROUNDING: f64 = 1e-6;
        let (input, weight) = self.halves();
        self.backward - (input + weight) <= ROUNDING * self.backward
    }

    fn times(&self) -> [(&'static str, f64); 5] {
        let (input, weight) = self.halves();
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
    /// Checks that every time is one, and that no backward is longer than its two halves.
    ///
    /// # Errors
    /// With the first layer whose time is negative or no number, or whose halves do not add up.
    pub fn check(&self) -> Result<(), BalanceError> {
        for (layer, costs) in self.layers.iter().enumerate() {
            for (what, value) in costs.times() {
                if !is_time(value) {
                    return Err(BalanceError::BadTime { layer, what, value });
                }
            }
            if !costs.halves_add_up() {
                let (input_gradient, weight_gradient) = costs.halves();
                let backward = costs.backward;
                return Err(BalanceError::BadHalves {
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
