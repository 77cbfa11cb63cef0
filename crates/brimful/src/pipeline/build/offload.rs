//! Offload settings: locations of the stages' weights and boundaries, on the device or on the host.

use std::collections::{BTreeSet, HashMap};

use tch::Tensor;

use crate::balance::Balance;
use crate::pipeline::error::PipelineError;
use crate::pipeline::offload::DEVICE_BUFFERS;
use crate::{Layers, Result};
use brimful_plan::bytes::Bytes;
use brimful_plan::plan::PlanRow;
use brimful_plan::schedule::{
    ActionKind, Actions, DeviceId, Location, Recompute, Schedule, StageLocation, TransferKind,
    Transfers,
};

/// Location of the stages' weights, gradients and optimizer state between their uses.
///
/// An offloaded stage computes on its device like any other. Its weights come over the host link ahead of their
/// use, and its gradients go to the host when they are complete. The device updates the stage when its weights are
/// fetched the next time. So a model may be as large as host memory. With a
/// [breadth-first](brimful_plan::schedule::Schedule::BreadthFirst) schedule, weights cross the link once forward
/// and once backward, for any number of micro-batches.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Offload {
    /// Keeps every stage on its device.
    #[default]
    Device,
    /// Offloads every stage to the host.
    Host,
    /// Sets the location of each stage, in order.
    Each(Vec<Location>),
    /// Offloads as many stages as needed for the shortest step within the memory of devices and host. Recomputes
    /// activations where the saved memory lets more stages stay on the device. Measures the layers with
    /// [`Builder::sample`](super::Builder::sample), and counts the optimizer's state only if it is
    /// [reserved](super::Builder::reserve).
    ///
    /// A model that fits stays on its devices, in the balance for which the plan found that it fits. For a model
    /// that does not fit, the plan chooses balance, schedule and boundaries, and which stages recompute their
    /// activations, in place of [`Builder::boundaries`](super::Builder::boundaries) and
    /// [`Builder::recompute`](super::Builder::recompute). The number of micro-batches stays.
    ///
    /// [`Builder::balance`](super::Builder::balance) and [`Builder::schedule`](super::Builder::schedule) stay too.
    /// If one of them is set, all stages of a model that does not fit are offloaded. A schedule that splits the
    /// backward of more than two stages per device cannot be offloaded. With exact BatchNorms, all stages are
    /// offloaded if weights, gradients and optimizer state do not fit, and otherwise none.
    Auto {
        /// Bytes of each device; `None` for its memory limit, or else a GPU's free memory.
        gpu: Option<Bytes>,
        /// Bytes of host memory; `None` for the free bytes of a limited [host arena](super::Builder::host), or
        /// else nine tenths of the free host memory.
        host: Option<Bytes>,
    },
}

/// Micro-batch with which [`Offload::Auto`] measures layers, its loss, and the number of samples per mini-batch.
#[derive(Debug)]
pub(super) struct Sample {
    pub(super) inputs: Tensor,
    pub(super) targets: Tensor,
    pub(super) loss: fn(&Tensor, &Tensor) -> Tensor,
    pub(super) batch_size: usize,
}

impl Offload {
    /// Returns the location of each stage, for this number of stages.
    pub(crate) fn of(&self, stages: usize) -> Result<Vec<Location>> {
        match self {
            // `settle_offload` replaces `Auto` before there are stages.
            Self::Device | Self::Auto { .. } => Ok(vec![Location::Device; stages]),
            Self::Host => Ok(vec![Location::Host; stages]),
            Self::Each(locations) if locations.len() == stages => Ok(locations.clone()),
            Self::Each(locations) => {
                Err(PipelineError::WrongLocations { given: locations.len(), stages }.into())
            }
        }
    }
}

/// Offloads all stages of one device that share parameters if one of them is offloaded, because a shared
/// parameter is one tensor.
pub(super) fn bring_together(
    locations: &mut [Location],
    layers: &Layers,
    balance: &Balance,
    placement: &[DeviceId],
) -> Result<()> {
    let stage_of = |layer: usize| balance.ranges().position(|range| range.contains(&layer));
    let shared: Vec<_> = (layers.shared()?.into_iter())
        .filter_map(|(user, owner)| Some((stage_of(user)?, stage_of(owner)?)))
        .filter(|(user, owner)| placement[*user] == placement[*owner])
        .collect();
    // Owners come first, because one owner may have several users.
    let owners = shared.iter().copied();
    let users = shared.iter().map(|&(user, owner)| (owner, user));
    for (one, other) in owners.chain(users) {
        if locations[one] == Location::Host {
            locations[other] = Location::Host;
        }
    }
    Ok(())
}

/// Checks that no autograd graph outlives the weights that it refers to. The graph of an offloaded stage refers to
/// weights in a device buffer. Between the forward or recomputation that makes the graph and its backward, the
/// buffer must not be released to a different stage.
pub(crate) fn check_offloaded_graphs(
    actions: &Actions,
    locations: &[StageLocation],
    device_buffers: usize,
) -> Result<()> {
    if locations.iter().all(|location| location.weights == Location::Device) {
        return Ok(());
    }
    let transfers = Transfers::new(actions, locations, device_buffers)?;
    for (device, list) in actions.lists().iter().enumerate() {
        let mut leaving =
            transfers.of(device).iter().filter(|one| one.kind == TransferKind::Release);
        let mut left: Vec<usize> = vec![0; locations.len()];
        let mut made = HashMap::new();
        let mut next = leaving.next();
        for (at, &action) in list.iter().enumerate() {
            while let Some(one) = next.filter(|one| one.before <= at) {
                left[one.stage.index()] += 1;
                next = leaving.next();
            }
            let (graph, now) = ((action.stage, action.micro_batch), left[action.stage.index()]);
            match action.kind {
                ActionKind::Forward | ActionKind::Recompute => drop(made.insert(graph, now)),
                _ if made.get(&graph) != Some(&now) => {
                    let error =
                        PipelineError::GraphOutlivesWeights { action, device, device_buffers };
                    return Err(error.into());
                }
                _ => {}
            }
        }
    }
    Ok(())
}

/// Returns the recomputation asked for, but at least `least` for a stage that must recompute, such as one
/// whose weights leave between forward and backward.
pub(crate) fn recompute_at_least(
    asked: Recompute,
    is_run_again: bool,
    least: Recompute,
) -> Recompute {
    match asked {
        Recompute::Never | Recompute::ExceptLast if is_run_again => least,
        asked => asked,
    }
}

/// Returns whether offloaded stages can run this schedule. A split backward allows at most two stages on a device, one
/// for each device buffer.
pub fn is_offloadable(schedule: Schedule) -> bool {
    !schedule.splits_backward() || schedule.stages_per_device() <= DEVICE_BUFFERS
}

impl From<Vec<Location>> for Offload {
    fn from(locations: Vec<Location>) -> Self {
        Self::Each(locations)
    }
}

impl<const N: usize> From<[Location; N]> for Offload {
    fn from(locations: [Location; N]) -> Self {
        Self::Each(locations.into())
    }
}

impl From<&PlanRow> for Offload {
    fn from(row: &PlanRow) -> Self {
        Self::Each(row.stages.iter().map(|stage| stage.weights).collect())
    }
}

/// Locations of the stages' boundaries, on the device or on the host.
#[derive(Debug, Clone, Default)]
pub(super) enum BoundaryLocations {
    /// Boundaries that a device with offloaded stages sends or receives wait on the host: the device may have too
    /// little memory for all of them.
    #[default]
    Usual,
    All(Location),
    /// Location of each stage's boundaries, from a plan.
    Each(Vec<Location>),
}

impl BoundaryLocations {
    /// Returns this setting, but the default in place of the locations of a plan.
    pub(super) fn unless_planned(self) -> Self {
        if let Self::Each(_) = self { Self::Usual } else { self }
    }
}

/// Returns device or host for each stage's weights and boundaries.
pub(super) fn stage_locations(
    weights: &[Location],
    boundaries: &BoundaryLocations,
    placement: &[DeviceId],
) -> Vec<StageLocation> {
    let of_devices = weights.iter().zip(placement);
    let crowded: BTreeSet<_> = of_devices
        .filter(|(location, _)| **location == Location::Host)
        .map(|(_, device)| *device)
        .collect();
    let location = |j: usize| {
        let is_crowded = placement[j.saturating_sub(1)..=j].iter().any(|at| crowded.contains(at));
        let usual = if is_crowded { Location::Host } else { Location::Device };
        let boundaries = match boundaries {
            BoundaryLocations::All(location) if is_crowded => *location,
            BoundaryLocations::Each(each) => each.get(j).copied().unwrap_or(usual),
            BoundaryLocations::All(_) | BoundaryLocations::Usual => usual,
        };
        StageLocation { weights: weights[j], boundaries, trained: true }
    };
    (0..weights.len()).map(location).collect()
}
