//! Ways to run one stage, with the bytes and the time of each.

use crate::schedule::{Actions, Costs, Location, StageCost, StageId, StageLocation};

/// Way to run a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StageWay {
    pub(super) weights: Location,
    pub(super) kept: Kept,
}

/// Data kept of a micro-batch between its forward and its backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kept {
    /// Input and activations stay.
    Activations,
    /// The input stays; the activations are recomputed.
    Input,
    /// The input is offloaded; the activations are recomputed.
    Nothing,
}

impl StageWay {
    /// All ways, the leanest last. Activations are kept only if the weights stay on the device: the autograd graph
    /// refers to the device memory of the weights, and other stages reuse the memory of an offloaded stage.
    pub(super) const ALL: [Self; 5] = [
        Self { weights: Location::Device, kept: Kept::Activations },
        Self { weights: Location::Device, kept: Kept::Input },
        Self { weights: Location::Device, kept: Kept::Nothing },
        Self { weights: Location::Host, kept: Kept::Input },
        Self { weights: Location::Host, kept: Kept::Nothing },
    ];

    /// Returns the index of this way with its weights offloaded; it keeps at most the input.
    pub(super) fn at_host(self) -> usize {
        let kept = if self.kept == Kept::Nothing { Kept::Nothing } else { Kept::Input };
        let way = Self { weights: Location::Host, kept };
        Self::ALL.iter().position(|other| *other == way).unwrap_or(Self::ALL.len() - 1)
    }

    pub(super) fn location(self) -> StageLocation {
        let boundaries = if self.kept == Kept::Nothing { Location::Host } else { Location::Device };
        StageLocation { weights: self.weights, boundaries, trained: true }
    }
}

/// Cost of one stage's way by itself; the simulation adds the interactions with other stages.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct WayCost {
    pub(super) device_bytes: u64,
    pub(super) host_bytes: u64,
    pub(super) seconds: f64,
    /// Part of `seconds`: the time by which copies slow down concurrent compute.
    pub(super) disturbance: f64,
}

/// Share of a copy's time by which the copy slows down concurrent matrix products (measured: 8 GiB of copies delay
/// 160 ms of products by 2.3 ms). With this cost, the planner leaves stages that fit on the device.
const DISTURBANCE: f64 = 0.015;

/// One stage in one step.
pub(super) struct StageStep<'a> {
    pub(super) costs: &'a Costs,
    pub(super) actions: &'a Actions,
    pub(super) stage: StageId,
    /// Number of fetches of its weights if it is offloaded.
    pub(super) fetches: usize,
}

impl StageStep<'_> {
    pub(super) fn cost(&self, way: StageWay) -> WayCost {
        let cost = &self.costs.stages[self.stage.index()];
        let input = self.costs.input_bytes_of(self.stage);
        // `actions` has no recomputation, so `held` counts all micro-batches in flight.
        let under_way = self.actions.held(self.stage) as u64;
        let boundaries = under_way.saturating_mul(input);
        let activations = under_way.saturating_mul(cost.activation_bytes);
        let (kept, put_away) = match way.kept {
            Kept::Activations => (activations.saturating_add(boundaries), 0),
            Kept::Input => (boundaries, 0),
            Kept::Nothing => (0, boundaries),
        };
        let (resident, on_host) = match way.weights {
            Location::Device => (self.resident_bytes(cost), 0),
            Location::Host => (0, self.offloaded_bytes(cost)),
        };
        let host_link = self.host_link_times(way, cost, input as f64);
        // A boundary is copied out once and in twice, its gradient once in each direction: five copies.
        let disturbance = DISTURBANCE
            * (2.0 * host_link.fetch
                + host_link.update_in
                + host_link.update_out
                + host_link.sent
                + 5.0 * host_link.boundaries);
        WayCost {
            device_bytes: kept.saturating_add(resident),
            host_bytes: on_host.saturating_add(put_away),
            seconds: self.seconds(way, cost, host_link) + disturbance,
            disturbance,
        }
    }

    /// Returns the bytes on the host: the weights, the optimizer's state, and the gradients unless stages are
    /// updated in the backward.
    fn offloaded_bytes(&self, cost: &StageCost) -> u64 {
        let gradients = if self.costs.update_in_backward { 0 } else { cost.sent_bytes };
        cost.offloaded_bytes.saturating_add(cost.optimizer_bytes).saturating_add(gradients)
    }

    fn resident_bytes(&self, cost: &StageCost) -> u64 {
        let gradients = if self.costs.update_in_backward { 0 } else { cost.gradient_bytes };
        cost.parameter_bytes.saturating_add(gradients).saturating_add(cost.optimizer_bytes)
    }

    fn host_link_times(&self, way: StageWay, cost: &StageCost, input: f64) -> HostLinkTimes {
        let m = self.actions.micro_batches() as f64;
        let host_link = self.costs.host_link;
        let at_host = way.weights == Location::Host;
        let only_if = |is_so: bool, time: f64| if is_so { time } else { 0.0 };
        let fetches = self.fetches as f64 / 2.0;
        HostLinkTimes {
            update_in: only_if(at_host, cost.update_in_bytes as f64 / host_link.both),
            update_out: only_if(at_host, cost.update_out_bytes as f64 / host_link.both),
            fetch: only_if(at_host, fetches * cost.fetched_bytes as f64 / host_link.inward),
            sent: only_if(at_host, cost.sent_bytes as f64 / host_link.outward),
            boundaries: only_if(way.kept == Kept::Nothing, m * input / host_link.both),
        }
    }

    /// Returns the time of the stage in one step. Compute and transfers overlap, so the longer one counts.
    /// Forward and backward are estimated separately, because breadth first has one fetch in each.
    fn seconds(&self, way: StageWay, cost: &StageCost, host_link: HostLinkTimes) -> f64 {
        let m = self.actions.micro_batches() as f64;
        let again = if way.kept == Kept::Activations { 0.0 } else { cost.recompute };
        let in_backward = self.costs.update_in_backward;
        let update_in = |here: bool| if here { host_link.update_in } else { 0.0 };
        let inward = (host_link.fetch + update_in(!in_backward)).max(host_link.boundaries);
        let forward = (m * cost.forward).max(inward).max(host_link.update_out);
        let inward = host_link.fetch + update_in(in_backward) + 2.0 * host_link.boundaries;
        let outward = host_link.sent + host_link.boundaries;
        let backward = (m * (cost.backward + again)).max(inward).max(outward);
        forward + backward
    }
}

/// Transfer times of a stage in the forward or the backward of a step.
#[derive(Debug, Clone, Copy)]
struct HostLinkTimes {
    fetch: f64,
    /// Copy of the data that an update needs; `update_out` copies the data that it changed.
    update_in: f64,
    update_out: f64,
    sent: f64,
    boundaries: f64,
}
