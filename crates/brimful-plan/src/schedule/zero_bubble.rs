//! Zero-bubble H1, also interleaved: split backwards, whose weight gradients fill the bubble.
//!
//! The previous stage waits only for the input gradient (I). The weight gradient (W) runs when no other
//! action is more urgent:
//!
//! ```text
//! stage 0  F0 F1 F2 F3 ·  ·  ·  I0 W0 I1 W1 I2 W2 I3 W3
//! stage 1  ·  F0 F1 F2 ·  ·  I0 F3 I1 W0 I2 W1 I3 W2 W3
//! stage 2  ·  ·  F0 F1 ·  I0 F2 I1 F3 I2 W0 I3 W1 W2 W3
//! stage 3  ·  ·  ·  F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3
//! ```
//!
//! Device d delays its weight gradients by d. So every device holds as many activations as the first device, and
//! that one holds as many as with 1F1B. The overhead falls from (s − 1)(F + I + W) to (s − 1)(F + I − W).
//!
//! The interleaved form runs ahead half as far as interleaved 1F1B, so gradients would queue on their return to
//! the last device. Reordering avoids the queues by running urgent actions as soon as their input arrives. Over p
//! ≤ 8, v ≤ 4 and m < 6p, the reordered steps are as short as the original ones with unlimited channels in 99 of
//! 100 cases.

use super::interleaved::Rounds;
use super::{Action, ActionKind, one_place, validate};

/// Returns the lists of `p` devices with `v` stages each, for `m` micro-batches; H1 is v = 1.
pub(super) fn lists(p: usize, v: usize, m: usize) -> Vec<Vec<Action>> {
    let rounds = Rounds::new(p, v, m);
    let lists: Vec<_> = (0..p).map(|d| list(&rounds, d, p - 1 - d)).collect();
    if validate::one_place_suffices(&lists) {
        return lists;
    }
    // Neither of the two orders is always the shorter one, and both are quick to make.
    let reordered = [1, 2].map(|turns| one_place::reorder(&lists, urgency(p, turns)));
    one_place::shortest(reordered.into_iter().flatten()).unwrap_or(lists)
}

/// Ranks input gradients first and weight gradients last. Within a kind, actions are ranked by their position,
/// less `turns` · p for each earlier round over the devices: later stages of a device come earlier.
fn urgency(p: usize, turns: usize) -> impl Fn(usize, Action) -> one_place::Rank {
    move |position, action| {
        let class = match action.kind {
            ActionKind::InputGradient => 0,
            ActionKind::Forward => 1,
            _ => 2,
        };
        let round = action.stage.index() / p;
        (class, position as i64 - (turns * p * round) as i64)
    }
}

/// Returns a device's list; `lead` is the distance to the last device, which is the number of additional
/// forwards before the first gradient.
fn list(rounds: &Rounds, device: usize, lead: usize) -> Vec<Action> {
    let forwards = rounds.forwards(device);
    let inputs = rounds.backwards(device, ActionKind::InputGradient);
    let weights = rounds.backwards(device, ActionKind::WeightGradient);
    // Half of interleaved 1F1B's lead, because activations stay until their weight gradient, and `device` weight
    // gradients are delayed below. In total every device holds the activations of p · v stages, which are p A.
    let ahead = (rounds.first_return() + lead).min(forwards.len());
    let pairs = forwards.len() - ahead;

    let mut list = forwards[..ahead].to_vec();
    for k in 0..pairs {
        list.extend([forwards[ahead + k], inputs[k]]);
        // The first `device` weight gradients are delayed: they fill the gaps in which this device would
        // wait for gradients at the end.
        if k >= device {
            list.push(weights[k - device]);
        }
    }
    // No forwards are left: a delayed weight gradient follows each input gradient, and the remaining ones
    // come last.
    let done = pairs.saturating_sub(device);
    for k in pairs..inputs.len() {
        list.extend([inputs[k], weights[done + k - pairs]]);
    }
    list.extend(&weights[done + ahead..]);
    list
}
