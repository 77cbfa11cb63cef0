//! GPipe: every forward, then every backward, the last micro-batch first.
//!
//! ```text
//! stage 0  F0 F1 F2 F3 ·  ·  ·  ·  ·  ·  ·  ·  ·  B3─── B2─── B1─── B0───
//! stage 1  ·  F0 F1 F2 F3 ·  ·  ·  ·  ·  ·  B3─── B2─── B1─── B0─── ·  ·
//! stage 2  ·  ·  F0 F1 F2 F3 ·  ·  ·  B3─── B2─── B1─── B0─── ·  ·  ·  ·
//! stage 3  ·  ·  ·  F0 F1 F2 F3 B3─── B2─── B1─── B0─── ·  ·  ·  ·  ·  ·
//! ```
//!
//! The simplest schedule, and the one that holds the most: all m micro-batches on every stage. The
//! backwards run in reverse, so that the last micro-batch's activations are used while they are
//! still there, and need no recompute.

use super::{Action, ActionKind, MicroBatchId, StageId};

/// The lists of `s` devices, one stage each, for `m` micro-batches.
pub(super) fn lists(s: usize, m: usize) -> Vec<Vec<Action>> {
    (0..s).map(|j| list(StageId::at(j), m)).collect()
}

fn list(stage: StageId, m: usize) -> Vec<Action> {
    let action = |kind| move |i| Action::new(stage, kind, MicroBatchId::at(i));
    let forwards = (0..m).map(action(ActionKind::Forward));
    let backwards = (0..m).rev().map(action(ActionKind::Backward));
    forwards.chain(backwards).collect()
}
