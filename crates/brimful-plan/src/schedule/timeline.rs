//! A step as it ran or was simulated: each device's actions with their times, and what it held.

use serde::{Deserialize, Serialize};

use super::{Action, BusUse};

/// An action and its time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// What is done.
    pub action: Action,
    /// From when.
    pub start: f64,
    /// Until when.
    pub end: f64,
    /// The most bytes on its device as it began or ended; 0 where they are not counted.
    pub bytes: u64,
}

/// What one device did during the step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeviceUse {
    /// Time at work.
    pub busy: f64,
    /// Time without work, until the last device is done.
    pub idle: f64,
    /// The most bytes that it held.
    pub peak_bytes: u64,
    /// The most activations that it held, each of one micro-batch on one stage.
    pub peak_held: usize,
}

/// A step as it was simulated.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Simulation {
    pub(super) timeline: Vec<Vec<Span>>,
    pub(super) devices: Vec<DeviceUse>,
    pub(super) makespan: f64,
    /// The use of each device's bus; none where nothing can cross it.
    pub(super) buses: Vec<BusUse>,
    /// Time and bytes held, for each device, where the actions alone do not tell them.
    pub(super) levels: Vec<Vec<(f64, u64)>>,
}

impl Simulation {
    /// Time from the first beginning to the last end, of actions and of moves.
    #[must_use]
    pub fn makespan(&self) -> f64 {
        self.makespan
    }

    /// Idle time of all devices over all their time: 0 where everyone always works.
    #[must_use]
    pub fn bubble(&self) -> f64 {
        // Shares are added, not times: a sum of times could be too large for a number.
        let idle: f64 = self.devices.iter().map(|device| device.idle / self.makespan).sum();
        if self.makespan > 0.0 { idle / self.devices.len() as f64 } else { 0.0 }
    }

    /// What each device did.
    #[must_use]
    pub fn devices(&self) -> &[DeviceUse] {
        &self.devices
    }

    /// The actions of each device with their times.
    #[must_use]
    pub fn timeline(&self) -> &[Vec<Span>] {
        &self.timeline
    }

    /// What crossed each device's bus, in the order of the beginnings in each direction, and what its compute waited
    /// for of that; none where everything lives on the devices.
    #[must_use]
    pub fn buses(&self) -> &[BusUse] {
        &self.buses
    }
}
