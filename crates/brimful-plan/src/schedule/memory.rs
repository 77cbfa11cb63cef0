//! Memory of a device while it runs its actions.
//!
//! For one micro-batch on one stage:
//!
//! ```text
//! kept         F ── input + activations ───────────── B    (W, where the backward is split)
//! recomputed   F ── input ────────── R ── + activations ── B
//! while an action runs, also its working bytes; for B (or I) the gradients of the stage's output and input
//! ```
//!
//! If the previous stage is on the same device and keeps its activations, the input is one of them, and is
//! counted there. Other boundaries between two stages on one device are counted from their creation.
//!
//! Between I and W a split backward holds the inputs of W: gradients made by I, and some of the activations. In a
//! transformer these are as many bytes as before I, which is the default if they were not measured. In a chain of
//! linear layers and tanh they are twice as many.
//!
//! Parameters and the optimizer's state are in use all the time. The sums of a stage's gradients are in use
//! from its first backward on. At the end of the step, the sums are cast to the parameters' dtype.

use std::collections::BTreeSet;

use super::{Action, ActionKind, Actions, Costs, Span, StageCost, StageId};

/// Returns the largest number of activations held at one time.
pub(super) fn most_held(actions: &Actions, spans: &[Span]) -> usize {
    let without_bytes = Costs::equal(actions.stages(), StageCost::default());
    let mut most = 0;
    walk(actions, &without_bytes, spans, |_, _, held| most = most.max(held));
    most
}

/// Sets the bytes held during every span; returns the peak bytes, and the largest number of activations.
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

/// Calls `look` with the time, the bytes and the number of activations held, at the start and the end of
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
        // An action's peak is at its start, which counts its working bytes, or at its end. So the memory at these
        // two times is enough.
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

/// Returns bytes of boundaries between two stages of one device: those that an action takes over, and
/// those that it leaves to a later action.
fn waiting(costs: &Costs, action: Action, held: HeldAs) -> (u128, u128) {
    let HeldAs { is_recomputed, before, is_after_here } = held;
    let input = u128::from(costs.input_bytes_of(action.stage));
    let output = u128::from(costs.of(action).output_bytes);
    let only_if = |is_so: bool, bytes: u128| if is_so { bytes } else { 0 };
    match action.kind {
        // If a forward keeps its activations, its output is one of them.
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

/// Returns the bytes that are always in use, for all stages on the device of these spans.
fn lasting(actions: &Actions, costs: &Costs, spans: &[Span]) -> u128 {
    let Some(span) = spans.first() else { return 0 };
    let device = actions.placement()[span.action.stage.index()];
    let stages = actions.placement().iter().zip(&costs.stages);
    stages.filter(|(at, _)| **at == device).map(|(_, cost)| cost.lasting_bytes()).sum()
}

/// Change of a device's memory by an action.
#[derive(Debug)]
pub(super) struct Hold {
    /// Bytes in use from its start.
    pub(super) takes: u128,
    /// Bytes in use only while it runs.
    pub(super) passing: u128,
    /// Bytes freed at its end.
    pub(super) gives: u128,
    /// Whether it keeps a micro-batch's activations.
    pub(super) kept: bool,
}

/// Memory mode of a micro-batch on a stage.
#[derive(Debug, Clone, Copy)]
pub(super) struct HeldAs {
    /// Whether its activations are recomputed.
    pub(super) is_recomputed: bool,
    pub(super) before: StageBefore,
    /// Whether the next stage is on the same device.
    pub(super) is_after_here: bool,
}

/// Place of the previous stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StageBefore {
    /// Another device, or no previous stage.
    Elsewhere,
    /// This device.
    Here,
    /// This device, where the previous stage's output stays with its activations.
    HereAndKept,
}

impl Actions {
    /// Returns the memory mode of the action's micro-batch on its stage.
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
    /// Returns the bytes that an action needs only while it runs, beside the gradients of its stage's input
    /// and output.
    pub(super) fn working_bytes(&self, action: Action, is_recomputed: bool) -> u128 {
        let cost = self.of(action);
        let kept = cost.activation_bytes;
        let bytes = match action.kind {
            // A forward without a graph needs no more than one with a graph.
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

    /// Returns the bytes of a backward beyond the activations and the gradients of its stage's input and
    /// output. `later` bytes are allocated at its end, when all activations except the output are freed.
    fn backward_bytes(&self, action: Action, later: u64) -> u64 {
        let (cost, ends) = (self.of(action), self.end_gradients(action.stage));
        let at_end = match later {
            0 => 0,
            _ => ends.saturating_add(cost.output_bytes).saturating_add(later),
        };
        let most = cost.backward_peak.max(at_end);
        most.saturating_sub(ends.saturating_add(cost.activation_bytes))
    }

    /// Returns the bytes of the gradients of a stage's output and input. The first stage's input has none.
    fn end_gradients(&self, stage: StageId) -> u64 {
        let input = if stage > StageId(0) { self.input_bytes_of(stage) } else { 0 };
        self.stages[stage.index()].output_bytes.saturating_add(input)
    }
}

impl Hold {
    /// Returns the change by an action whose micro-batch has this memory mode.
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
