//! Statistics of a captured micro-batch, for each of its replays.
//!
//! A deferred layer's rows have a fixed address in the CUDA graph, so they are copied to the step's own rows
//! after each replay. A layer that moves its statistics at every micro-batch does so inside the graph, so their
//! values are saved before each replay.

use brimful_torch::foreach;
use tch::Tensor;

use super::pool::Row;
use super::{Pending, Running, STEP, at_once};
use crate::{Error, Result};

/// Layers of a captured micro-batch that have reported.
#[derive(Debug)]
pub(crate) struct GraphStatistics {
    rows: Vec<(Running, Row)>,
    changed: Vec<Running>,
}

impl Pending {
    /// Converts the reports during a capture into updates for each replay.
    pub(crate) fn into_graph_statistics(self) -> GraphStatistics {
        let rows = self.deferred.into_values().flat_map(|seen| {
            let rows = seen.rows_so_far();
            rows.into_iter().map(move |row| (seen.running.share(), row))
        });
        let changed = self.changed.into_values().map(|(running, ..)| running);
        GraphStatistics { rows: rows.collect(), changed: changed.collect() }
    }
}

impl GraphStatistics {
    /// Saves the values of the statistics that the replay will move.
    pub(crate) fn before(&self) -> Result<()> {
        self.changed.iter().try_for_each(|running| at_once(running).map(drop))
    }

    /// Adds the replay's rows to the current step.
    pub(crate) fn after(&self) -> Result<()> {
        // One copy for the rows of all layers: one each would cost the launches that the replay saves.
        let mut into = Vec::new();
        let mut from = Vec::new();
        STEP.with_borrow_mut(|step| {
            let Some(pending) = step else { return Ok::<_, Error>(()) };
            for (running, row) in &self.rows {
                let (mean, variance) = pending.next_rows(running, row.count)?;
                into.extend([mean, variance]);
                from.extend([&row.mean, &row.variance].map(Tensor::shallow_clone));
            }
            Ok(())
        })?;
        Ok(foreach::copy(&into, &from)?)
    }
}
