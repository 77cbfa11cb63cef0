//! Breadth first, and GPipe: every micro-batch goes through a stage before the first goes through the next
//! one.
//!
//! The stages are assigned to the devices in rounds, as for interleaved 1F1B. Here p = v = m = 2:
//!
//! ```text
//! device 0  0F0 0F1 2F0 2F1 ·   ·   ·   2B1──── 2B0──── 0B1──── 0B0────
//! device 1  ·   1F0 1F1 3F0 3F1 3B1──── 3B0──── 1B1──── 1B0──── ·   ·
//! ```
//!
//! A stage runs all its forwards in a row and all its backwards in another, so offloaded weights are fetched once
//! for the forwards and once for the backwards, however many micro-batches there are (see
//! [`Transfers`](super::Transfers)). The price is that every boundary waits for the whole mini-batch. The
//! backwards run in reverse order: the last activations are used first.
//!
//! With one stage on each device it is GPipe: every forward, then every backward, the last micro-batch
//! first.
//!
//! ```text
//! stage 0  F0 F1 F2 F3 ·  ·  ·  ·  ·  ·  ·  ·  ·  B3─── B2─── B1─── B0───
//! stage 1  ·  F0 F1 F2 F3 ·  ·  ·  ·  ·  ·  B3─── B2─── B1─── B0─── ·  ·
//! stage 2  ·  ·  F0 F1 F2 F3 ·  ·  ·  B3─── B2─── B1─── B0─── ·  ·  ·  ·
//! stage 3  ·  ·  ·  F0 F1 F2 F3 B3─── B2─── B1─── B0─── ·  ·  ·  ·  ·  ·
//! ```
//!
//! GPipe is the simplest schedule, and holds the most activations: all m micro-batches on every stage. The
//! backwards run in reverse order, so that the last micro-batch's activations are used right after its
//! forward, and need no recompute.

use super::{Action, ActionKind, MicroBatchId, StageId};

/// Returns the lists of `p` devices with `v` stages each, for `m` micro-batches; GPipe is v = 1.
pub(super) fn lists(p: usize, v: usize, m: usize) -> Vec<Vec<Action>> {
    (0..p).map(|device| list(p, v, m, device)).collect()
}

fn list(p: usize, v: usize, m: usize, device: usize) -> Vec<Action> {
    let mut list = Vec::with_capacity(2 * v * m);
    for turn in 0..v {
        let stage = StageId::at(turn * p + device);
        list.extend((0..m).map(|i| Action::new(stage, ActionKind::Forward, MicroBatchId::at(i))));
    }
    // The backwards mirror the forwards: gradients go all the way back.
    let backward = |forward: &Action| Action { kind: ActionKind::Backward, ..*forward };
    let backwards: Vec<_> = list.iter().rev().map(backward).collect();
    list.extend(backwards);
    list
}
