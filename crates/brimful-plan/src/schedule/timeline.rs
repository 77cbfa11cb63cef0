//! Timeline of a step, measured or simulated: each device's actions with their times, and its memory.

use serde::{Deserialize, Serialize};

use super::{Action, HostLinkUse};

/// Action and its time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// Action.
    pub action: Action,
    /// Start.
    pub start: f64,
    /// End.
    pub end: f64,
    /// Largest number of bytes on its device at its start or end; 0 if they are not counted.
    pub bytes: u64,
}

/// Use of one device during the step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeviceUse {
    /// Time during which it computes.
    pub busy: f64,
    /// Idle time until the last device is done.
    pub idle: f64,
    /// Peak bytes in use.
    pub peak_bytes: u64,
    /// Largest number of activations held, each of one micro-batch on one stage.
    pub peak_held: usize,
}

/// Simulated or measured step.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Simulation {
    pub(super) timeline: Vec<Vec<Span>>,
    pub(super) devices: Vec<DeviceUse>,
    pub(super) makespan: f64,
    /// Use of each device's host link; empty without transfers.
    pub(super) host_links: Vec<HostLinkUse>,
    /// Bytes held by each device at each time, if the actions alone do not determine them.
    pub(super) levels: Vec<Vec<(f64, u64)>>,
}

impl Simulation {
    /// Returns the time from the first start to the last end, of actions and transfers.
    #[must_use]
    pub fn makespan(&self) -> f64 {
        self.makespan
    }

    /// Returns the idle time of all devices as a share of their total time: 0 if all devices are always busy.
    #[must_use]
    pub fn bubble(&self) -> f64 {
        // Sums shares, not times: a sum of times could overflow.
        let idle: f64 = self.devices.iter().map(|device| device.idle / self.makespan).sum();
        if self.makespan > 0.0 { idle / self.devices.len() as f64 } else { 0.0 }
    }

    /// Returns the use of each device.
    #[must_use]
    pub fn devices(&self) -> &[DeviceUse] {
        &self.devices
    }

    /// Returns the actions of each device with their times.
    #[must_use]
    pub fn timeline(&self) -> &[Vec<Span>] {
        &self.timeline
    }

    /// Returns the transfers of each device, by start in each direction, and its waits for them; empty
    /// without offloading.
    #[must_use]
    pub fn host_links(&self) -> &[HostLinkUse] {
        &self.host_links
    }
}
