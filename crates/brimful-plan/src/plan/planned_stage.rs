//! One stage of an answer: where it lives, and what becomes of its activations.

use serde::Serialize;

use crate::schedule::{Home, Recompute, StageHome};

/// What is planned for a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct PlannedStage {
    /// Where its weights live, and with them their gradients and the optimizer's state.
    pub weights: Home,
    /// Where its inputs wait between its forward and its backward.
    pub boundaries: Home,
    /// Which of its activations are computed again; the others are kept.
    pub recompute: Recompute,
}

impl PlannedStage {
    /// A stage that has everything on its device.
    #[must_use]
    pub const fn resident(recompute: Recompute) -> Self {
        Self { weights: Home::Device, boundaries: Home::Device, recompute }
    }

    /// Where a trained stage's things live.
    #[must_use]
    pub const fn home(self) -> StageHome {
        StageHome { weights: self.weights, boundaries: self.boundaries, trained: true }
    }
}
