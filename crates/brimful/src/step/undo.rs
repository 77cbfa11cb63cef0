//! Rollback of everything that an attempt changes outside its gradients.
//!
//! Some BatchNorm layers, such as tch's own, move their running statistics at every micro-batch, even in a step that
//! fails later. So these statistics are saved before each step, and a warning recommends a layer of this library once.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use tch::Tensor;
use tch::nn::Variables;

use crate::Result;
use crate::random::Randomness;
use crate::statistics::Pending;

/// State before an attempt, to be restored.
#[derive(Debug, Default)]
pub(crate) struct Undo {
    pub(crate) statistics: Pending,
    pub(crate) randomness: Randomness,
    /// Running statistics of layers that do not report, with their values before the attempt.
    pub(crate) unmanaged: Vec<(Tensor, Tensor)>,
}

impl Undo {
    /// Restores statistics and random state.
    pub(crate) fn run(self) -> Result<()> {
        self.randomness.restore()?;
        put_back(self.unmanaged)?;
        self.statistics.undo()
    }

    /// Adds a later part of the same step, whose statistics have been pooled. The state before the first part
    /// counts.
    pub(crate) fn extend(&mut self, later: Self) {
        self.statistics.extend(later.statistics);
    }
}

/// Restores running statistics in place, because layers hold the tensors.
pub(crate) fn put_back(statistics: Vec<(Tensor, Tensor)>) -> Result<()> {
    for (mut running, before) in statistics {
        running.f_copy_(&before)?;
    }
    Ok(())
}

/// Record of layers that do not report their statistics, as far as training steps have shown them.
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
            // Each layer has a mean and a variance.
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
