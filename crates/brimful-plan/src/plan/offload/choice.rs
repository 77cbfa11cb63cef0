//! Result of the search: where each stage is placed, its recomputation, and the simulated step.

use crate::schedule::{Actions, Location, Recompute, Simulation, Transfers};

/// Choice for every stage, with which the step fits.
#[derive(Debug, Clone)]
pub struct OffloadChoice {
    /// Recomputation of each stage.
    pub recompute: Vec<Recompute>,
    /// Actions of the step.
    pub actions: Actions,
    /// Transfers between devices and host, with the placement of each stage and the number of device
    /// buffers.
    pub transfers: Transfers,
    /// Simulated step; its makespan is the step's time, without an optimizer.
    pub simulation: Simulation,
    /// Bytes in host memory.
    pub host_bytes: u64,
}

impl OffloadChoice {
    /// Returns the number of offloaded stages.
    #[must_use]
    pub fn at_host(&self) -> usize {
        self.transfers
            .locations()
            .iter()
            .filter(|location| location.weights == Location::Host)
            .count()
    }

    /// Returns the peak bytes on each device.
    #[must_use]
    pub fn peak_bytes(&self) -> Vec<u64> {
        self.simulation.devices().iter().map(|device| device.peak_bytes).collect()
    }
}
