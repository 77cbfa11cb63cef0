//! What a device holds while it works through its actions.
//!
//! Of one micro-batch on one stage:
//!
//! ```text
//! kept         F ── input + activations ───────────── B    (W, where the backward is split)
//! recomputed   F ── input ────────── R ── + activations ── B
//! while B (or I) runs, also the gradients of the stage's output and of its input
//! ```
//!
//! Between its halves a split backward holds what W needs: gradients that I has made, and some of what the
//! forward kept. In a transformer that is as much as before, and where it is not known it is taken to be;
//! in a chain of linear layers and tanh it is twice as much.
//!
//! Parameters, their gradients and the optimizer's state are there all the time.

use super::{Action, ActionKind, Actions, Costs, Span, StageCost, StageId};

/// The most that was held at one time.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Peak {
    pub(super) bytes: u64,
    pub(super) held: usize,
}

/// The most activations that are held at one time.
pub(super) fn most_held(actions: &Actions, spans: &[Span]) -> usize {
    let without_bytes = Costs::equal(actions.stages(), StageCost::default());
    let mut most = 0;
    walk(actions, &without_bytes, spans, |_, _, held| most = most.max(held));
    most
}

/// Writes into every span the bytes that are held while it runs, and finds the peak.
pub(super) fn fill(actions: &Actions, costs: &Costs, spans: &mut [Span]) -> Peak {
    let mut peak = Peak::default();
    let mut ends = Vec::with_capacity(2 * spans.len());
    walk(actions, costs, spans, |_, bytes, held| {
        peak = Peak { bytes: peak.bytes.max(bytes), held: peak.held.max(held) };
        ends.push(bytes);
    });
    for (span, ends) in spans.iter_mut().zip(ends.chunks(2)) {
        span.bytes = ends.iter().copied().max().unwrap_or(0);
    }
    peak
}

/// Calls `look` with the time, the bytes and the activations held, at the beginning and the end of
/// every action.
pub(super) fn walk(
    actions: &Actions,
    costs: &Costs,
    spans: &[Span],
    mut look: impl FnMut(f64, u64, usize),
) {
    // 128 bits hold any sum of the 64-bit sizes.
    let mut bytes = resident(actions, costs, spans);
    let mut held = 0;
    for span in spans {
        let Action { stage, micro_batch, .. } = span.action;
        let is_recomputed = actions.is_recomputed(stage, micro_batch);
        let Hold { takes, passing, gives, kept } = Hold::new(costs, span.action, is_recomputed);
        // Within an action only what passes is more than before or after, so its two ends show the peak.
        bytes += takes;
        held += usize::from(kept);
        look(span.start, clamp(bytes + passing), held);
        bytes -= gives;
        held -= usize::from(span.action.kind.releases());
        look(span.end, clamp(bytes), held);
    }
}

fn clamp(bytes: u128) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

/// The bytes of all stages on the device whose spans these are.
fn resident(actions: &Actions, costs: &Costs, spans: &[Span]) -> u128 {
    let Some(span) = spans.first() else { return 0 };
    let device = actions.placement()[span.action.stage.index()];
    let stages = actions.placement().iter().zip(&costs.stages);
    stages.filter(|(at, _)| **at == device).map(|(_, cost)| cost.resident_bytes()).sum()
}

/// How an action changes what its device holds.
#[derive(Debug)]
pub(super) struct Hold {
    /// Bytes that are there from its beginning.
    pub(super) takes: u128,
    /// Bytes that are there only while it runs.
    pub(super) passing: u128,
    /// Bytes that are gone after its end.
    pub(super) gives: u128,
    /// Whether it keeps a micro-batch's activations.
    pub(super) kept: bool,
}

impl Hold {
    /// Of an action whose micro-batch is recomputed on its stage, or is not.
    pub(super) fn new(costs: &Costs, action: Action, is_recomputed: bool) -> Self {
        let cost = &costs.stages[action.stage.index()];
        let input = u128::from(costs.input_bytes_of(action.stage));
        let activations = u128::from(cost.activation_bytes);
        let kept = match action.kind {
            ActionKind::Forward => !is_recomputed,
            kind => kind == ActionKind::Recompute,
        };
        let before = input + activations;
        let between = cost.split_bytes.map_or(before, u128::from);
        let takes = match action.kind {
            ActionKind::Forward => input,
            ActionKind::InputGradient => between.saturating_sub(before),
            _ => 0,
        };
        let gives = match action.kind {
            ActionKind::InputGradient => before.saturating_sub(between),
            ActionKind::WeightGradient => between,
            kind => {
                if kind.releases() {
                    before
                } else {
                    0
                }
            }
        };
        // Of its input, the first stage makes no gradient: nobody is before it.
        let gradients =
            u128::from(cost.output_bytes) + if action.stage > StageId(0) { input } else { 0 };
        Self {
            takes: takes + if kept { activations } else { 0 },
            passing: if action.kind.passes_gradient() { gradients } else { 0 },
            gives,
            kept,
        }
    }
}
