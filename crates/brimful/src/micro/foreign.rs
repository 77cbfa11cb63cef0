//! BatchNorm layers that do not know of micro-batches, such as tch's own.
//!
//! They move their running statistics at every micro-batch, whatever becomes of the step. So these
//! are saved before a step, and the user is told once that a layer of this library would do better.

use std::sync::{Mutex, PoisonError};

use tch::Tensor;
use tch::nn::Variables;

use crate::Result;
use crate::statistics::Pending;

/// What is known of such layers.
#[derive(Debug, Default)]
pub(crate) struct Search {
    /// Running statistics that no layer has reported; before the first step, all of them.
    found: Option<Vec<Tensor>>,
    told: bool,
}

impl Search {
    /// The statistics that nobody reports, each with a copy of what it is now.
    pub(crate) fn save(&self, variables: &Mutex<Variables>) -> Result<Vec<(Tensor, Tensor)>> {
        let copy = |t: &Tensor| Ok((t.shallow_clone(), t.f_detach_copy()?));
        match &self.found {
            Some(found) => found.iter().map(copy).collect(),
            None => all(variables).iter().map(copy).collect(),
        }
    }

    /// Learns from a step which statistics nobody reports, and warns where micro-batches move them.
    pub(crate) fn judge(
        &mut self,
        reported: &Pending,
        saved: &[(Tensor, Tensor)],
        micro_batches: usize,
    ) {
        let foreign = saved.iter().filter(|(running, _)| !reported.knows(running));
        let moved: Vec<Tensor> = foreign
            .filter(|(running, before)| running != before)
            .map(|(running, _)| running.shallow_clone())
            .collect();
        if micro_batches > 1 && !moved.is_empty() && !self.told {
            self.told = true;
            tracing::warn!(
                layers = moved.len().div_ceil(2),
                micro_batches,
                "BatchNorm of tch moves its running statistics at every micro-batch: use \
                 brimful::nn::batch_norm2d (or 1d, 3d), which moves them once a step, as the whole \
                 mini-batch would"
            );
        }
        if self.found.is_none() {
            self.found = Some(moved);
        }
    }
}

fn all(variables: &Mutex<Variables>) -> Vec<Tensor> {
    let variables = variables.lock().unwrap_or_else(PoisonError::into_inner);
    let is_statistic = |name: &str| name.ends_with("running_mean") || name.ends_with("running_var");
    let named = variables.named_variables.iter().filter(|(name, _)| is_statistic(name));
    named.map(|(_, tensor)| tensor.shallow_clone()).collect()
}
