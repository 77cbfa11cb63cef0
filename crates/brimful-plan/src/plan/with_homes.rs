//! Breadth first with stages on the host, for a model that fits on the devices in no other way.

use serde::Serialize;

use crate::balance::{self, Slot};
use crate::schedule::{DeviceId, Recompute, Schedule, StageHome};

use super::homes::{HomeError, HomeRequest, choose};
use super::stage_costs::StepCosts;
use super::{PlanChoice, PlanError, PlanRow, Request};

/// Where the stages of a row live, and what they recompute.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RowHomes {
    /// Where each stage lives.
    pub homes: Vec<StageHome>,
    /// What each stage recomputes.
    pub recompute: Vec<Recompute>,
    /// How many stages that live on the host a device has room for at one time.
    pub slots: usize,
    /// The bytes that live on the host.
    pub host_bytes: u64,
}

/// The most stages: the model is cut as fine as it can be, so that slots are small, but a step is
/// simulated many times for a choice.
const MOST_STAGES: usize = 64;

/// A row for each number of micro-batches with which something fits.
pub(super) fn rows(request: &Request<'_>, host_memory: u64) -> Result<Vec<PlanRow>, PlanError> {
    let devices = request.devices.len();
    let stages_per_device = request.profile.layers.len().min(MOST_STAGES) / devices;
    if stages_per_device == 0 {
        return Ok(Vec::new());
    }
    let schedule = Schedule::BreadthFirst { stages_per_device };
    let possible = request.micro_batches.iter().filter(|m| **m <= request.samples);
    let mut rows = Vec::new();
    for &micro_batches in possible {
        let choice = PlanChoice { schedule, micro_batches, recompute: Recompute::ExceptLast };
        rows.extend(row(request, choice, host_memory)?);
    }
    Ok(rows)
}

fn row(
    request: &Request<'_>,
    choice: PlanChoice,
    host_memory: u64,
) -> Result<Option<PlanRow>, PlanError> {
    let PlanChoice { schedule, micro_batches, recompute } = choice;
    let devices = request.devices.len();
    let actions = schedule.actions(devices, micro_batches, recompute)?;
    let costs = StepCosts::new(request, micro_batches);
    let slot = |device: &DeviceId| Slot {
        speed: request.devices[device.index()].speed,
        ..Slot::default()
    };
    let slots: Vec<_> = actions.placement().iter().map(slot).collect();
    let balance = balance::by_time(&costs.loads(recompute), &slots)?;
    let costs = costs.stages(&balance, actions.placement());
    let question = HomeRequest {
        memory: request.devices.iter().map(|device| device.memory).collect(),
        host_memory: Some(host_memory),
        ..HomeRequest::new(&costs, schedule, devices, micro_batches)
    };
    let chosen = match choose(&question) {
        Ok(chosen) => chosen,
        Err(HomeError::DeviceTooSmall { .. } | HomeError::HostTooSmall { .. }) => return Ok(None),
        Err(HomeError::Schedule(error)) => return Err(error.into()),
        Err(HomeError::Cost(error)) => return Err(error.into()),
        Err(HomeError::Moves(error)) => return Err(PlanError::Cost(error.into())),
    };
    let homes = RowHomes {
        homes: chosen.moves.homes().to_vec(),
        recompute: chosen.recompute,
        slots: chosen.moves.slots(),
        host_bytes: chosen.host_bytes,
    };
    let row = PlanRow::new(choice, balance, &chosen.simulation, &request.devices);
    Ok(Some(PlanRow { homes: Some(homes), ..row }))
}
