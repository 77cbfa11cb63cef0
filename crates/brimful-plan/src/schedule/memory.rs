//! What a device holds while it works through its actions.
//!
//! Of one micro-batch on one stage:
//!
//! ```text
//! kept         F ── input + activations ───────────── B    (W, where the backward is split)
//! recomputed   F ── input ────────── R ── + activations ── B
//! while one of them runs, also what it works with; B (or I) with the gradients of the stage's output and input
//! ```
//!
//! Of a stage whose neighbour before it is on the same device and keeps its activations, the input is that
//! one's output, and counted there. What else waits between two stages of one device is there from its making.
//!
//! Between its halves a split backward holds what W needs: gradients that I has made, and some of what the
//! forward kept. In a transformer that is as much as before, and where it is not known it is taken to be;
//! in a chain of linear layers and tanh it is twice as much.
//!
//! Parameters and the optimizer's state are there all the time, the sums of a stage's gradients from its first
//! backward on; when all is done, these become gradients of the parameters' number type.

use std::collections::BTreeSet;

use super::{Action, ActionKind, Actions, Costs, Span, StageCost, StageId};

/// The most activations that are held at one time.
pub(super) fn most_held(actions: &Actions, spans: &[Span]) -> usize {
    let without_bytes = Costs::equal(actions.stages(), StageCost::default());
    let mut most = 0;
    walk(actions, &without_bytes, spans, |_, _, held| most = most.max(held));
    most
}

/// Writes into every span the bytes that are held while it runs; gives the most bytes, and the most activations.
pub(super) fn fill(actions: &Actions, costs: &Costs, spans: &mut [Span]) -> (u64, usize) {
    let mut peak = (0, 0);
    let mut ends = Vec::with_capacity(2 * spans.len());
    walk(actions, costs, spans, |_, bytes, held| {
        peak = (peak.0.max(bytes), peak.1.max(held));
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
    let mut bytes = lasting(actions, costs, spans);
    let mut summed = BTreeSet::new();
    let mut held = 0;
    for span in spans {
        let held_as = actions.held_of(span.action);
        let Hold { takes, passing, gives, kept } = Hold::new(costs, span.action, held_as);
        let (taken_up, left) = waiting(costs, span.action, held_as);
        let is_first = span.action.kind.releases() && summed.insert(span.action.stage);
        bytes += if is_first { u128::from(costs.of(span.action).gradient_bytes) } else { 0 };
        // Within an action only what passes is more than before or after, so its two ends show the peak.
        bytes = bytes + takes - taken_up;
        held += usize::from(kept);
        look(span.start, clamp(bytes + passing), held);
        bytes = bytes + left - gives;
        held -= usize::from(span.action.kind.releases());
        look(span.end, clamp(bytes), held);
    }
    let casts: u128 =
        summed.iter().map(|stage| u128::from(costs.stages[stage.index()].cast_bytes)).sum();
    if let Some(last) = spans.last().filter(|_| casts > 0) {
        look(last.end, clamp(bytes + casts), held);
    }
}

pub(super) fn clamp(bytes: u128) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

/// What an action takes up of what waits between stages of its own device, and what it leaves there.
fn waiting(costs: &Costs, action: Action, held: HeldAs) -> (u128, u128) {
    let HeldAs { is_recomputed, before, is_after_here } = held;
    let input = u128::from(costs.input_bytes_of(action.stage));
    let output = u128::from(costs.of(action).output_bytes);
    let only_if = |is_so: bool, bytes: u128| if is_so { bytes } else { 0 };
    match action.kind {
        // Of a forward that keeps its activations, the output is among them.
        ActionKind::Forward => (
            only_if(before == StageBefore::Here, input),
            only_if(is_after_here && is_recomputed, output),
        ),
        kind if kind.passes_gradient() => {
            (only_if(is_after_here, output), only_if(before != StageBefore::Elsewhere, input))
        }
        _ => (0, 0),
    }
}

/// The bytes that are there all the time, of all stages on the device whose spans these are.
fn lasting(actions: &Actions, costs: &Costs, spans: &[Span]) -> u128 {
    let Some(span) = spans.first() else { return 0 };
    let device = actions.placement()[span.action.stage.index()];
    let stages = actions.placement().iter().zip(&costs.stages);
    stages.filter(|(at, _)| **at == device).map(|(_, cost)| cost.lasting_bytes()).sum()
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

/// What becomes of a micro-batch on a stage.
#[derive(Debug, Clone, Copy)]
pub(super) struct HeldAs {
    /// Its activations are computed again.
    pub(super) is_recomputed: bool,
    pub(super) before: StageBefore,
    /// Whether the stage after it is on the same device.
    pub(super) is_after_here: bool,
}

/// The stage before one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StageBefore {
    /// On another device, or there is none.
    Elsewhere,
    /// On the same device.
    Here,
    /// On the same device, where its output stays with its activations.
    HereAndKept,
}

impl Actions {
    /// What becomes of the action's micro-batch on its stage.
    pub(super) fn held_of(&self, action: Action) -> HeldAs {
        let Action { stage, micro_batch, .. } = action;
        let place = |j: usize| self.placement().get(j).copied();
        let before = stage.index().checked_sub(1).filter(|j| place(*j) == place(stage.index()));
        HeldAs {
            is_recomputed: self.is_recomputed(stage, micro_batch),
            before: match before {
                None => StageBefore::Elsewhere,
                Some(j) if self.is_recomputed(StageId::at(j), micro_batch) => StageBefore::Here,
                Some(_) => StageBefore::HereAndKept,
            },
            is_after_here: place(stage.index() + 1) == place(stage.index()),
        }
    }
}

impl Costs {
    /// What an action needs only while it runs, beside the gradients of its stage's input and output.
    pub(super) fn working_bytes(&self, action: Action, is_recomputed: bool) -> u128 {
        let cost = self.of(action);
        let kept = cost.activation_bytes;
        let bytes = match action.kind {
            // Without a graph it needs no more than with one.
            ActionKind::Forward if is_recomputed => cost.forward_peak.max(kept),
            ActionKind::Forward | ActionKind::Recompute => cost.forward_peak.saturating_sub(kept),
            ActionKind::InputGradient => self.backward_bytes(action, 0),
            ActionKind::WeightGradient => cost.fresh_bytes.saturating_add(cost.converted_bytes),
            ActionKind::Backward => {
                let converted = self.backward_bytes(action, cost.converted_bytes);
                cost.fresh_bytes.saturating_add(converted)
            }
        };
        u128::from(bytes)
    }

    /// What a backward needs beside what was kept and the gradients of its stage's ends, where so many bytes come
    /// when what was kept is gone but for the output.
    fn backward_bytes(&self, action: Action, later: u64) -> u64 {
        let (cost, ends) = (self.of(action), self.end_gradients(action.stage));
        let at_end = match later {
            0 => 0,
            _ => ends.saturating_add(cost.output_bytes).saturating_add(later),
        };
        let most = cost.backward_peak.max(at_end);
        most.saturating_sub(ends.saturating_add(cost.activation_bytes))
    }

    /// The gradients of a stage's input and output. Of its input, the first makes none: nobody is before it.
    fn end_gradients(&self, stage: StageId) -> u64 {
        let input = if stage > StageId(0) { self.input_bytes_of(stage) } else { 0 };
        self.stages[stage.index()].output_bytes.saturating_add(input)
    }
}

impl Hold {
    /// Of an action whose micro-batch is held in this way.
    pub(super) fn new(costs: &Costs, action: Action, held: HeldAs) -> Self {
        let HeldAs { is_recomputed, before, .. } = held;
        let cost = costs.of(action);
        let input = match before {
            StageBefore::HereAndKept => 0,
            _ => u128::from(costs.input_bytes_of(action.stage)),
        };
        let activations = u128::from(cost.activation_bytes);
        let kept = action.kind.keeps(is_recomputed);
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
            ActionKind::Backward => before,
            _ => 0,
        };
        let gradients = u128::from(costs.end_gradients(action.stage));
        let ends = if action.kind.passes_gradient() { gradients } else { 0 };
        Self {
            takes: takes + if kept { activations } else { 0 },
            passing: ends + costs.working_bytes(action, is_recomputed),
            gives,
            kept,
        }
    }
}
