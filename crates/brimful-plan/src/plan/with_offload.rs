//! Plans breadth-first steps with offloaded stages, for a model that does not fit otherwise.

use crate::balance::{self, Balance, LayerCost};
use crate::schedule::{DeviceId, Recompute, Schedule};

use super::offload::{OffloadChoice, OffloadError, OffloadRequest, choose};
use super::stage_costs::StepCosts;
use super::{PlanChoice, PlanError, PlanRow, PlannedStage, Request};

/// Largest number of stages. The model is cut finely, so that device buffers are small. The limit keeps the search
/// short, because it simulates many steps.
const MOST_STAGES: usize = 128;

/// Returns a row for each number of micro-batches with which the model fits.
pub(super) fn rows(request: &Request<'_>, host_memory: u64) -> Result<Vec<PlanRow>, PlanError> {
    let devices = request.devices.len();
    let weights = |layer: &LayerCost| layer.parameter_bytes;
    let weights: Vec<_> = request.profile.layers.iter().map(weights).collect();
    let finest = balance::finest(&weights, MOST_STAGES)?.sizes().len();
    let stages_per_device = finest / devices;
    if stages_per_device == 0 {
        return Ok(Vec::new());
    }
    let balance = balance::finest(&weights, stages_per_device * devices)?;
    let schedule = Schedule::BreadthFirst { stages_per_device };
    let possible = request.micro_batches.iter().filter(|m| **m <= request.samples);
    let mut rows = Vec::new();
    for &micro_batches in possible {
        let choice = PlanChoice { schedule, micro_batches, recompute: Recompute::ExceptLast };
        rows.extend(row(request, choice, &balance, host_memory)?);
    }
    Ok(rows)
}

fn row(
    request: &Request<'_>,
    choice: PlanChoice,
    balance: &Balance,
    host_memory: u64,
) -> Result<Option<PlanRow>, PlanError> {
    let PlanChoice { schedule, micro_batches, recompute } = choice;
    let devices = request.devices.len();
    let actions = schedule.actions(devices, micro_batches, recompute)?;
    let costs = StepCosts::new(request, micro_batches).with_offload();
    let costs = costs.stages(balance, actions.placement());
    let question = OffloadRequest {
        memory: request.devices.iter().map(|device| device.memory).collect(),
        host_memory: Some(host_memory),
        ties: ties(request, balance, actions.placement()),
        ..OffloadRequest::new(&costs, schedule, devices, micro_batches)
    };
    let chosen = match choose(&question) {
        Ok(chosen) => chosen,
        Err(OffloadError::DeviceTooSmall { .. } | OffloadError::HostTooSmall { .. }) => {
            return Ok(None);
        }
        Err(OffloadError::Schedule(error)) => return Err(error.into()),
        Err(OffloadError::Cost(error)) => return Err(error.into()),
    };
    let OffloadChoice { transfers, host_bytes, .. } = &chosen;
    let row = PlanRow::new(choice, balance.clone(), &chosen.simulation, &request.devices);
    let (device_buffers, host_bytes) = (transfers.device_buffers(), *host_bytes);
    Ok(Some(PlanRow { stages: stages(&chosen), device_buffers, host_bytes, ..row }))
}

/// Returns the pairs of stages that share parameters and are on one device. Stages on different devices have a
/// copy each.
fn ties(request: &Request<'_>, balance: &Balance, placement: &[DeviceId]) -> Vec<(usize, usize)> {
    let stage_of = |layer: usize| balance.ranges().position(|range| range.contains(&layer));
    let layers = request.profile.layers.iter().enumerate();
    let pairs =
        layers.filter_map(|(user, layer)| Some((stage_of(user)?, stage_of(layer.shares?.layer)?)));
    pairs.filter(|(user, owner)| placement[*user] == placement[*owner]).collect()
}

fn stages(chosen: &OffloadChoice) -> Vec<PlannedStage> {
    let locations = chosen.transfers.locations().iter().zip(&chosen.recompute);
    let stage = locations.map(|(location, recompute)| PlannedStage {
        weights: location.weights,
        boundaries: location.boundaries,
        recompute: *recompute,
    });
    stage.collect()
}
