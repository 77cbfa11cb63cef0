//! BatchNorm layers that move their running statistics at every micro-batch, such as tch's own.
//!
//! They do so even in a step that fails later. So these statistics are saved before each step, and a warning
//! recommends a layer of this library once.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use tch::Tensor;
use tch::nn::Variables;

use crate::Result;
use crate::statistics::Pending;

/// Record of such layers, as far as training steps have shown them.
#[derive(Debug, Default)]
pub(crate) struct UnmanagedStatistics {
    /// Addresses of running statistics that layers have reported; `None` before the first training step. The
    /// store may grow: all other statistics are saved.
    reported: Option<HashSet<usize>>,
    /// True once statistics were compared after several micro-batches, which waits for the device.
    looked: bool,
    /// Number of layers whose statistics differed in that comparison.
    moving_layers: usize,
}

impl UnmanagedStatistics {
    /// Returns the statistics that no layer reports, each with a copy of its value.
    pub(crate) fn save(&self, variables: &Mutex<Variables>) -> Result<Vec<(Tensor, Tensor)>> {
        // Copies cost memory and time at every step; `Pending` restores reported statistics without them.
        let known = |t: &Tensor| self.reported.as_ref().is_some_and(|all| all.contains(&place(t)));
        let foreign = all(variables).into_iter().filter(|t| !known(t));
        foreign.map(|t| Ok((t.shallow_clone(), t.f_detach_copy()?))).collect()
    }

    /// Learns from a training step which statistics no layer reports, and warns if micro-batches move them.
    pub(crate) fn judge(
        &mut self,
        reported: &Pending,
        saved: &[(Tensor, Tensor)],
        micro_batches: usize,
    ) {
        let foreign = || saved.iter().filter(|(running, _)| !reported.knows(running));
        if micro_batches > 1 && !self.looked {
            self.looked = true;
            let moved = foreign().filter(|(running, before)| running != before).count();
            // Each has a mean and a variance.
            self.moving_layers = moved.div_ceil(2);
            warn(self.moving_layers, micro_batches);
        }
        let ours = saved.iter().filter(|(running, _)| reported.knows(running));
        self.reported.get_or_insert_default().extend(ours.map(|(running, _)| place(running)));
    }

    /// Returns the number of layers that move their statistics at every micro-batch, as far as training steps have
    /// shown.
    pub(crate) fn moving_layers(&self) -> usize {
        self.moving_layers
    }
}

fn warn(layers: usize, micro_batches: usize) {
    if layers > 0 {
        tracing::warn!(
            layers,
            micro_batches,
            "BatchNorm of tch moves its running statistics at every micro-batch: use \
             brimful::nn::batch_norm2d (or 1d, 3d), which moves them once a step, as the whole \
             mini-batch would"
        );
    }
}

fn all(variables: &Mutex<Variables>) -> Vec<Tensor> {
    let variables = variables.lock().unwrap_or_else(PoisonError::into_inner);
    let is_statistic = |name: &str| name.ends_with("running_mean") || name.ends_with("running_var");
    let named = variables.named_variables.iter().filter(|(name, _)| is_statistic(name));
    named.map(|(_, tensor)| tensor.shallow_clone()).collect()
}

fn place(tensor: &Tensor) -> usize {
    tensor.data_ptr() as usize
}
