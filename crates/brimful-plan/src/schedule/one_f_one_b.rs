//! 1F1B: after a warm-up, one forward and one backward alternately.
//!
//! ```text
//! stage 0  F0 F1 F2 F3 ·  ·  ·  ·  ·  ·  B0─── ·  B1─── ·  B2─── ·  B3───
//! stage 1  ·  F0 F1 F2 ·  ·  ·  ·  B0─── F3 B1─── ·  B2─── ·  B3─── ·  ·
//! stage 2  ·  ·  F0 F1 ·  ·  B0─── F2 B1─── F3 B2─── ·  B3─── ·  ·  ·  ·
//! stage 3  ·  ·  ·  F0 B0─── F1 B1─── F2 B2─── F3 B3─── ·  ·  ·  ·  ·  ·
//! ```
//!
//! 1F1B is as fast as GPipe, but stage j holds s − j micro-batches instead of m, because a backward begins as
//! soon as its gradient can arrive.

use super::{Action, ActionKind, MicroBatchId, StageId};

/// Returns the lists of `s` devices, one stage each, for `m` micro-batches.
pub(super) fn lists(s: usize, m: usize) -> Vec<Vec<Action>> {
    (0..s).map(|j| list(StageId::at(j), (s - 1 - j).min(m), m)).collect()
}

/// Returns a stage's list: `ahead` forwards run before the first pair, so each backward is `ahead`
/// micro-batches behind its pair's forward.
fn list(stage: StageId, ahead: usize, m: usize) -> Vec<Action> {
    let forward = |i| Action::new(stage, ActionKind::Forward, MicroBatchId::at(i));
    let backward = |i| Action::new(stage, ActionKind::Backward, MicroBatchId::at(i));
    let warm_up = (0..ahead).map(forward);
    let steady = (ahead..m).flat_map(|i| [forward(i), backward(i - ahead)]);
    let cool_down = (m - ahead..m).map(backward);
    warm_up.chain(steady).chain(cool_down).collect()
}
