//! Row of a plan: a way to run the step, and its cost.

use std::cmp::Ordering;

use serde::Serialize;

use crate::balance::Balance;
use crate::schedule::{
    DeviceId, DeviceUse, Location, Recompute, ScheduleRecipe, Simulation, StageId,
};

use super::{Misfit, PlanChoice, PlanDevice, PlannedStage};

/// Way to run the step. Its fields are the keys of the program's `--json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PlanRow {
    /// Schedule, number of micro-batches, recomputation.
    #[serde(flatten)]
    pub choice: PlanChoice,
    /// Number of layers of each stage.
    pub balance: Balance,
    /// Time of one step.
    pub makespan: f64,
    /// Idle time of all devices as a share of their total time.
    pub bubble: f64,
    /// Peak bytes on each device.
    pub peak_bytes: Vec<u64>,
    /// Whether every device has enough memory.
    pub fits: bool,
    /// Devices with too little memory.
    pub misfits: Vec<Misfit>,
    /// Place and recomputation of each stage.
    pub stages: Vec<PlannedStage>,
    /// Number of device buffers for offloaded stages on each device.
    pub device_buffers: usize,
    /// Bytes of offloaded data in host memory.
    pub host_bytes: u64,
    /// Recipe of automatic schedules such as [`Schedule::Auto`](crate::schedule::Schedule::Auto).
    #[serde(skip)]
    pub recipe: Option<ScheduleRecipe>,
}

impl PlanRow {
    /// Creates the row of a simulated step without offloaded stages, and compares its peaks with the memory
    /// of the devices.
    #[must_use]
    pub fn new(
        choice: PlanChoice,
        balance: Balance,
        step: &Simulation,
        devices: &[PlanDevice],
    ) -> Self {
        let misfits = misfits(step, devices);
        let stages = balance.sizes().len();
        Self {
            stages: vec![PlannedStage::resident(choice.recompute); stages],
            device_buffers: 0,
            host_bytes: 0,
            choice,
            balance,
            makespan: step.makespan(),
            bubble: step.bubble(),
            peak_bytes: step.devices().iter().map(|used| used.peak_bytes).collect(),
            fits: misfits.is_empty(),
            misfits,
            recipe: None,
        }
    }

    /// Returns the largest peak of all devices.
    #[must_use]
    pub fn largest_peak(&self) -> u64 {
        self.peak_bytes.iter().copied().max().unwrap_or(0)
    }

    /// Returns the number of offloaded stages.
    #[must_use]
    pub fn at_host(&self) -> usize {
        self.stages.iter().filter(|stage| stage.weights == Location::Host).count()
    }

    /// Returns the recomputation of a stage.
    #[must_use]
    pub fn recompute_of(&self, stage: StageId) -> Recompute {
        self.stages.get(stage.index()).map_or(self.choice.recompute, |stage| stage.recompute)
    }

    /// Returns the largest excess of a device's memory, in bytes.
    pub(super) fn excess(&self) -> u64 {
        self.misfits.iter().map(Misfit::excess).max().unwrap_or(0)
    }

    /// Orders the better row first: rows that fit by time, others by excess. Steps that differ by less than
    /// `unit` are equal; then less memory wins, then the simpler choice.
    pub(super) fn rank(&self, other: &Self, unit: f64) -> Ordering {
        let units = |row: &Self| (row.makespan / unit).round();
        // A row that fits has an excess of 0, so it comes first.
        (self.excess().cmp(&other.excess()))
            .then(units(self).total_cmp(&units(other)))
            .then(self.largest_peak().cmp(&other.largest_peak()))
            .then(self.choice.complexity().cmp(&other.choice.complexity()))
    }
}

/// Returns the devices that would need more memory than they have.
#[must_use]
pub fn misfits(step: &Simulation, devices: &[PlanDevice]) -> Vec<Misfit> {
    let misfit = |(d, (used, device)): (usize, (&DeviceUse, &PlanDevice))| {
        let needed = used.peak_bytes;
        let memory = device.memory.filter(|memory| needed > *memory)?;
        Some(Misfit { device: DeviceId::at(d), needed, memory })
    };
    step.devices().iter().zip(devices).enumerate().filter_map(misfit).collect()
}
