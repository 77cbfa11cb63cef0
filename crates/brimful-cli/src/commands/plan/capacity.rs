//! Limits of offloading: the largest model that the memory holds, and the number of samples whose compute hides
//! the transfers.

use brimful::Bytes;
use brimful::balance::LayerCost;
use brimful::plan::Request;
use serde::Serialize;

/// Limits for models that consist of the planned model's layers; the fields are keys of `--json`.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Capacity {
    /// Bytes that a parameter takes, on a device or on the host: weight, optimizer state, and gradient if it is
    /// kept.
    bytes_per_parameter: f64,
    host_memory: u64,
    /// Memory of all devices, if it is limited.
    device_memory: Option<u64>,
    /// Number of parameters that host and devices can hold together.
    most_parameters: u64,
    /// Least number of samples per step whose compute takes as long as the transfers of a fully offloaded model;
    /// null if there is no such number.
    hidden_from_samples: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hidden_from_tokens: Option<u64>,
}

impl Capacity {
    /// Computes the limits. A weight has `weight` bytes, and a sample of text has `tokens_per_sample` tokens.
    /// Returns none without a host to offload to.
    pub(super) fn of(
        request: &Request<'_>,
        weight: usize,
        tokens_per_sample: Option<u64>,
    ) -> Option<Self> {
        let host_memory = request.host_memory?;
        let factor = 1.0 + request.optimizer_bytes + kept_gradient(request);
        let bytes_per_parameter = weight as f64 * factor;
        let limits = request.devices.iter().map(|device| device.memory);
        let device_memory = limits.reduce(|a, b| Some(a?.saturating_add(b?))).flatten();
        let used = working_bytes(request) * request.devices.len() as f64;
        let free = device_memory.map_or(0.0, |memory| (memory as f64 - used).max(0.0));
        let samples = hidden_from(request);
        Some(Self {
            bytes_per_parameter,
            host_memory,
            device_memory,
            most_parameters: ((host_memory as f64 + free) / bytes_per_parameter) as u64,
            hidden_from_samples: samples,
            hidden_from_tokens: (samples.zip(tokens_per_sample))
                .map(|(samples, tokens)| samples.saturating_mul(tokens)),
        })
    }

    /// Formats the limits as two lines of prose.
    pub(super) fn text(&self) -> String {
        let Self { bytes_per_parameter, host_memory, most_parameters, .. } = self;
        let devices = self
            .device_memory
            .map_or(String::new(), |memory| format!(" and {} of devices", Bytes(memory)));
        let hidden = match (self.hidden_from_samples, self.hidden_from_tokens) {
            (Some(samples), Some(tokens)) => {
                format!("are hidden from {samples} samples a step on ({tokens} tokens)")
            }
            (Some(samples), None) => format!("are hidden from {samples} samples a step on"),
            (None, _) => "are never hidden: its layers take no time".to_owned(),
        };
        format!(
            "\nA parameter takes {bytes_per_parameter:.2} bytes: {} of host memory{devices} hold at most {} \
             parameters.\nTransfers of a fully offloaded model {hidden}.\n",
            Bytes(*host_memory),
            millions(*most_parameters),
        )
    }
}

/// Formats a number in millions or billions.
fn millions(number: u64) -> String {
    match number as f64 / 1e6 {
        millions if millions < 1000.0 => format!("{millions:.1} million"),
        millions => format!("{:.1} billion", millions / 1000.0),
    }
}

/// Returns the bytes of gradients kept after the backward, for each byte of weights.
fn kept_gradient(request: &Request<'_>) -> f64 {
    match request.update_in_backward {
        true => 0.0,
        false => request.sent_gradient_bytes.unwrap_or(request.gradient_bytes),
    }
}

/// Returns the bytes of a device that are needed for work, and so cannot hold resident parameters. They are for
/// the largest layer: two buffers of weights, two buffers of optimizer state and kept gradients, the gradients,
/// and the activations.
fn working_bytes(request: &Request<'_>) -> f64 {
    let micro_batch = request.micro_batches.iter().map(|m| request.samples.div_ceil(*m)).min();
    let of_layer = |layer: &LayerCost| {
        let factor =
            2.0 * (1.0 + request.optimizer_bytes + kept_gradient(request)) + request.gradient_bytes;
        let activations = layer.activation_bytes.max(layer.backward_peak) as f64;
        layer.parameter_bytes as f64 * factor + activations * micro_batch.unwrap_or(1) as f64
    };
    request.profile.layers.iter().map(of_layer).fold(0.0, f64::max)
}

/// Returns the least number of samples per step that hides the transfers. With so many samples, the forward takes
/// as long as the transfers during the forward. The backward with recomputation takes as long as the transfers
/// during the backward. Transfers in both directions run at the same time.
fn hidden_from(request: &Request<'_>) -> Option<u64> {
    let layers = &request.profile.layers;
    let sum = |of: fn(&LayerCost) -> f64| layers.iter().map(of).sum::<f64>();
    let weights = sum(|layer| layer.parameter_bytes as f64);
    let (forward, backward) = (sum(|layer| layer.forward), sum(|layer| layer.backward));
    let (state, gradients) = (weights * request.optimizer_bytes, weights * kept_gradient(request));
    let link = request.host_link;
    let both = |inward: f64, outward: f64| inward.max(outward) / link.both;
    let (beside_forward, beside_backward) = match request.update_in_backward {
        true => (weights / link.inward, both(weights + state, weights + state)),
        false => (both(weights + state + gradients, weights + state), both(weights, gradients)),
    };
    let samples = (beside_forward / forward).max(beside_backward / (forward + backward));
    // Without weights and compute, `samples` is NaN (0 / 0). The cast makes it 0, because there are no transfers
    // to hide.
    (!samples.is_infinite()).then_some(samples.ceil() as u64)
}

#[cfg(test)]
mod tests {
    use brimful::balance::Profile;
    use brimful::plan::PlanDevice;
    use brimful_plan::schedule::HostLinkCost;

    use super::*;

    #[test]
    fn a_bf16_model_with_8_bit_state_takes_6_bytes_and_hides_what_it_moves() {
        let layer = LayerCost {
            forward: 1e-3,
            backward: 2e-3,
            parameter_bytes: 2_000_000,
            ..LayerCost::default()
        };
        let profile = Profile { input_bytes: 0, layers: vec![layer; 10] };
        let device = PlanDevice { memory: Some(1_000_000_000), ..PlanDevice::default() };
        let mut request = Request::new(&profile, vec![device], 16);
        request.optimizer_bytes = 2.0;
        request.gradient_bytes = 2.0;
        request.host_memory = Some(5_000_000_000);
        request.host_link = HostLinkCost::equal(1e9);
        let figures = |request: &Request<'_>, in_backward| {
            let request = Request { update_in_backward: in_backward, ..request.clone() };
            Capacity::of(&request, 2, Some(1024)).expect("a host")
        };
        let in_backward = figures(&request, true);
        assert_eq!(in_backward.bytes_per_parameter, 6.0);
        // Host and device have 6 GB, less two buffers of 2 + 4 MB and gradients of 4 MB.
        assert_eq!(in_backward.most_parameters, (6_000_000_000 - 16_000_000) / 6);
        // 20 MB are transferred during a forward of 10 ms per sample, and 60 MB during a backward of 30 ms.
        assert_eq!(in_backward.hidden_from_samples, Some(2));
        assert_eq!(in_backward.hidden_from_tokens, Some(2048));
        let after = figures(&request, false);
        assert_eq!(after.bytes_per_parameter, 10.0);
        // 20 + 40 + 40 MB are transferred during the forward.
        assert_eq!(after.hidden_from_samples, Some(10));
        assert!(after.text().contains("at most 597.6 million parameters"), "{}", after.text());
        request.sent_gradient_bytes = Some(1.0);
        assert_eq!(figures(&request, false).bytes_per_parameter, 8.0);
    }

    #[test]
    fn layers_that_take_no_time_hide_nothing() {
        let layer = LayerCost { parameter_bytes: 2_000_000, ..LayerCost::default() };
        let layer = LayerCost { forward: 0.0, backward: 0.0, ..layer };
        let profile = Profile { input_bytes: 0, layers: vec![layer] };
        let mut request = Request::new(&profile, vec![PlanDevice::default()], 16);
        request.host_memory = Some(5_000_000_000);
        request.host_link = HostLinkCost::equal(1e9);
        let capacity = Capacity::of(&request, 4, None).expect("a host");
        assert_eq!(capacity.hidden_from_samples, None);
        assert!(capacity.text().contains("never hidden"), "{}", capacity.text());
    }
}
