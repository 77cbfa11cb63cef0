//! What a captured micro-batch does to running statistics, for each of its replays.
//!
//! A deferred layer's rows have one address in the captured work, so they are copied from there to
//! the step's own after each replay. A layer that moves its statistics at once does so in the
//! captured work itself; what they were is kept before.

use brimful_torch::foreach;
use tch::Tensor;

use super::pool::Row;
use super::{Pending, Running, STEP, at_once};
use crate::{Error, Result};

/// What the layers of a captured micro-batch have reported.
#[derive(Debug)]
pub(crate) struct ReplayStatistics {
    rows: Vec<(Running, Row)>,
    changed: Vec<Running>,
}

impl Pending {
    /// What is to be done again, from the layers that reported while the work was captured.
    pub(crate) fn into_replay_statistics(self) -> ReplayStatistics {
        let rows = self.deferred.into_values().flat_map(|seen| {
            let rows = seen.rows_so_far();
            rows.into_iter().map(move |row| (seen.running.share(), row))
        });
        let changed = self.changed.into_values().map(|(running, ..)| running);
        ReplayStatistics { rows: rows.collect(), changed: changed.collect() }
    }
}

impl ReplayStatistics {
    /// Keeps what the replay is going to move.
    pub(crate) fn before(&self) -> Result<()> {
        self.changed.iter().try_for_each(|running| at_once(running).map(drop))
    }

    /// Files what the replay has seen under the step that is under way.
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
