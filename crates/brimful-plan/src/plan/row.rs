//! One answer of the planner: a way to run the step, and what it would cost.

use std::cmp::Ordering;

use serde::Serialize;

use crate::balance::Balance;
use crate::schedule::{DeviceId, DeviceUse, Home, Recompute, ScheduleRecipe, Simulation, StageId};

use super::{Misfit, PlanChoice, PlanDevice, PlannedStage};

/// A way to run the step. Its fields are the keys of the program's `--json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PlanRow {
    /// Schedule, number of micro-batches, recompute.
    #[serde(flatten)]
    pub choice: PlanChoice,
    /// How many layers each stage has.
    pub balance: Balance,
    /// Time of one step.
    pub makespan: f64,
    /// Idle device-time over all device-time.
    pub bubble: f64,
    /// The most bytes on each device.
    pub peak_bytes: Vec<u64>,
    /// Whether every device has the memory that it needs.
    pub fits: bool,
    /// The devices that have not.
    pub misfits: Vec<Misfit>,
    /// Where each stage lives, and what it computes again.
    pub stages: Vec<PlannedStage>,
    /// How many stages that live on the host a device has room for at one time.
    pub slots: usize,
    /// The bytes that live on the host.
    pub host_bytes: u64,
    /// Those beside them in which the optimizer looks ahead; 0 where it does not.
    pub ahead_bytes: u64,
    /// What the lists of [`Schedule::Auto`](crate::schedule::Schedule::Auto) are made from.
    #[serde(skip)]
    pub recipe: Option<ScheduleRecipe>,
}

impl PlanRow {
    /// Puts a simulated step, whose stages all live on their devices, beside what these have.
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
            slots: 0,
            host_bytes: 0,
            ahead_bytes: 0,
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

    /// The most bytes on any device.
    #[must_use]
    pub fn largest_peak(&self) -> u64 {
        self.peak_bytes.iter().copied().max().unwrap_or(0)
    }

    /// How many stages live on the host.
    #[must_use]
    pub fn at_host(&self) -> usize {
        self.stages.iter().filter(|stage| stage.weights == Home::Host).count()
    }

    /// What a stage computes again.
    #[must_use]
    pub fn recompute_of(&self, stage: StageId) -> Recompute {
        self.stages.get(stage.index()).map_or(self.choice.recompute, |stage| stage.recompute)
    }

    /// Bytes by which the worst device is over.
    pub(super) fn excess(&self) -> u64 {
        self.misfits.iter().map(Misfit::excess).max().unwrap_or(0)
    }

    /// The better one first: what fits, by time; what does not, by how much is missing. Steps that
    /// differ by less than `unit` are equal, and the one that needs less memory, then the simpler
    /// one, wins.
    pub(super) fn rank(&self, other: &Self, unit: f64) -> Ordering {
        let units = |row: &Self| (row.makespan / unit).round();
        // An excess of 0 is a row that fits, so these come first without being asked for.
        (self.excess().cmp(&other.excess()))
            .then(units(self).total_cmp(&units(other)))
            .then(self.largest_peak().cmp(&other.largest_peak()))
            .then(self.choice.complexity().cmp(&other.choice.complexity()))
    }
}

/// The devices that would need more memory than they have.
#[must_use]
pub fn misfits(step: &Simulation, devices: &[PlanDevice]) -> Vec<Misfit> {
    let misfit = |(d, (used, device)): (usize, (&DeviceUse, &PlanDevice))| {
        let needed = used.peak_bytes;
        let memory = device.memory.filter(|memory| needed > *memory)?;
        Some(Misfit { device: DeviceId::at(d), needed, memory })
    };
    step.devices().iter().zip(devices).enumerate().filter_map(misfit).collect()
}
