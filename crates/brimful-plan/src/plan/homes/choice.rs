//! The answer: where each stage lives, what it recomputes, and the step that comes of it.

use crate::schedule::{Actions, Home, Moves, Recompute, Simulation};

/// A way to run every stage that fits.
#[derive(Debug, Clone)]
pub struct HomeChoice {
    /// What each stage recomputes.
    pub recompute: Vec<Recompute>,
    /// What is run.
    pub actions: Actions,
    /// What moves; it has the homes and the number of slots.
    pub moves: Moves,
    /// When it runs; its makespan is the step's time, without an optimizer.
    pub simulation: Simulation,
    /// The bytes that live on the host.
    pub host_bytes: u64,
}

impl HomeChoice {
    /// How many stages live on the host.
    #[must_use]
    pub fn at_host(&self) -> usize {
        self.moves.homes().iter().filter(|home| home.weights == Home::Host).count()
    }

    /// The most bytes on each device.
    #[must_use]
    pub fn peak_bytes(&self) -> Vec<u64> {
        self.simulation.devices().iter().map(|device| device.peak_bytes).collect()
    }
}
