//! Plan of one stage: its place, and its recomputation.

use serde::Serialize;

use crate::schedule::{Location, Recompute, StageLocation};

/// Plan of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct PlannedStage {
    /// Place of its weights, their gradients and the optimizer's state.
    pub weights: Location,
    /// Place of its inputs between its forward and its backward.
    pub boundaries: Location,
    /// Activations that are recomputed; the others are kept.
    pub recompute: Recompute,
}

impl PlannedStage {
    /// Returns a stage with everything on its device.
    #[must_use]
    pub const fn resident(recompute: Recompute) -> Self {
        Self { weights: Location::Device, boundaries: Location::Device, recompute }
    }

    /// Returns the places of the stage's data; the stage is trained.
    #[must_use]
    pub const fn location(self) -> StageLocation {
        StageLocation { weights: self.weights, boundaries: self.boundaries, trained: true }
    }
}
