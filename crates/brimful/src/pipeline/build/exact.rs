//! Cuts a model before its exact BatchNorms, so that all micro-batches meet there.

use crate::balance::Balance;
use crate::pipeline::error::PipelineError;
use crate::schedule::Schedule;
use crate::{Layers, Result};

/// The balance with a cut before each exact BatchNorm, and the order in which all micro-batches pass a
/// stage before the first passes the next; nothing where there is no such layer.
pub(super) fn cut_at_norms(
    layers: &Layers,
    balance: &Balance,
) -> Result<Option<(Balance, Schedule)>> {
    let norms = layers.exact_norms()?;
    match norms.first() {
        None => return Ok(None),
        Some(0) => {
            let layer = layers.names().next().unwrap_or_default().to_owned();
            return Err(PipelineError::ExactFirst { layer }.into());
        }
        Some(_) => {}
    }
    let mut ends: Vec<usize> = balance.ranges().map(|range| range.end).chain(norms).collect();
    ends.sort_unstable();
    ends.dedup();
    let starts = std::iter::once(&0).chain(&ends);
    let sizes: Vec<usize> = ends.iter().zip(starts).map(|(end, start)| end - start).collect();
    let schedule = Schedule::BreadthFirst { stages_per_device: sizes.len() };
    Ok(Some((Balance::new(sizes, layers.len())?, schedule)))
}
