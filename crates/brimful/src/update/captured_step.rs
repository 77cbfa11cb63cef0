//! CUDA graph of an optimizer's step, with the addresses that it was captured for.

use brimful_torch::graph::Graph;
use tch::Tensor;

/// Addresses of the last step, and the CUDA graph captured for them.
#[derive(Debug, Default)]
pub(super) struct OptimizerGraphs {
    pub(super) wanted: bool,
    /// Addresses at the last step; `calm_steps` counts the consecutive steps with these addresses.
    pub(super) places: Vec<usize>,
    pub(super) calm_steps: usize,
    pub(super) captured: Option<Captured>,
    pub(super) captures: usize,
    pub(super) replayed: usize,
}

#[derive(Debug)]
pub(super) struct Captured {
    pub(super) graph: Graph,
    /// Learning rate of each group as the graph reads it, and the number last written there.
    pub(super) rates: Vec<(Tensor, f64)>,
}

impl OptimizerGraphs {
    /// Discards the graph: options other than learning rates are constants in it.
    pub(super) fn forget(&mut self) {
        let Self { wanted, captures, replayed, .. } = *self;
        *self = Self { wanted, captures, replayed, ..Self::default() };
    }
}
