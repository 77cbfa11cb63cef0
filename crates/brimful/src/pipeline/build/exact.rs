//! Cuts a model before its exact BatchNorms, where all micro-batches meet at a barrier.

use super::Builder;
use crate::Result;
use crate::balance::Balance;
use crate::pipeline::error::PipelineError;
use brimful_plan::schedule::Schedule;

impl Builder {
    /// Returns the balance with a cut before each exact BatchNorm, the breadth-first schedule, and whether there
    /// is such a layer. Without an exact BatchNorm, balance and schedule stay unchanged.
    pub(super) fn cut_at_norms(&self, balance: Balance) -> Result<(Balance, Schedule, bool)> {
        let norms = self.layers.exact_norms()?;
        match norms.first() {
            None => return Ok((balance, self.order(), false)),
            Some(0) => {
                let layer = self.layers.names().next().unwrap_or_default().to_owned();
                return Err(PipelineError::ExactFirst { layer }.into());
            }
            Some(_) => {}
        }
        let (devices, replicas, ranks) = (self.devices.len(), self.replicas, self.world.size());
        if devices.max(replicas).max(ranks) > 1 {
            return Err(PipelineError::ExactOnSeveral { devices, replicas, ranks }.into());
        }
        let mut ends: Vec<usize> = balance.ranges().map(|range| range.end).chain(norms).collect();
        ends.sort_unstable();
        ends.dedup();
        let starts = std::iter::once(&0).chain(&ends);
        let sizes: Vec<usize> = ends.iter().zip(starts).map(|(end, start)| end - start).collect();
        let schedule = Schedule::BreadthFirst { stages_per_device: sizes.len() };
        Ok((Balance::new(sizes, self.layers.len())?, schedule, true))
    }
}
