//! Zero-bubble V: two stages on each device, placed down and up again, with split backwards.
//!
//! Device d of p has the stages d and 2p − 1 − d, so the first device also has the last stage, whose
//! gradient is available at once. Every device holds the activations of p micro-batches on its two stages,
//! and at F = I = W no device idles between its first action and its last. Here p = 2, m = 3:
//!
//! ```text
//! device 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 ·
//! device 1  ·   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
//! ```

use super::{Action, ActionKind, MicroBatchId, StageId};

/// Returns the lists of `p` devices, two stages each, for `m` micro-batches.
///
/// The order has no gaps from 2p − 1 micro-batches on. If there are fewer, the rest is made and removed: a
/// valid order without one of its micro-batches is still valid.
pub(super) fn lists(p: usize, m: usize) -> Vec<Vec<Action>> {
    let made = m.max(2 * p - 1);
    (0..p)
        .map(|d| {
            let mut list = DeviceOrder::new(p, d).list(p, d, made);
            list.retain(|action| action.micro_batch.index() < m);
            list
        })
        .collect()
}

/// Directions of a micro-batch over a device.
const DOWN: usize = 0;
const UP: usize = 1;

/// Actions that a stage runs in a row while the pipeline is busy.
const BACKWARD: [ActionKind; 2] = [ActionKind::InputGradient, ActionKind::WeightGradient];

/// Order of a device's two stages, the one on the way down and the one on the way up.
#[derive(Debug)]
struct DeviceOrder {
    list: Vec<Action>,
    stages: [StageId; 2],
    /// Next micro-batch of each kind of action of each stage.
    next: [[usize; ActionKind::ALL.len()]; 2],
}

impl DeviceOrder {
    fn new(p: usize, d: usize) -> Self {
        let stages = [d, 2 * p - 1 - d].map(StageId::at);
        Self { list: Vec::new(), stages, next: Default::default() }
    }

    fn list(mut self, p: usize, d: usize, m: usize) -> Vec<Action> {
        // Fill the way down: a micro-batch returns here, at the stage on the way up, 2(p − d) − 1 ticks
        // after it left, and one forward a tick keeps the device busy until then.
        for _ in 0..2 * (p - d) - 1 {
            self.run(DOWN, [ActionKind::Forward]);
        }
        // Fill both ways: the gradient of a micro-batch returns 2d + 1 ticks after its forward on the way up.
        // These ticks are d pairs of forwards, and the forward of the first full cycle.
        for _ in 0..d {
            self.run(UP, [ActionKind::Forward]);
            self.run(DOWN, [ActionKind::Forward]);
        }
        for _ in 0..p - d {
            self.run(UP, [ActionKind::Forward]);
            self.run(UP, BACKWARD);
        }
        // Steady: each stage alternates one forward and one whole backward.
        while self.is_left(UP, ActionKind::Forward, m) {
            if self.is_left(DOWN, ActionKind::Forward, m) {
                self.run(DOWN, [ActionKind::Forward]);
            }
            self.run(DOWN, BACKWARD);
            self.run(UP, [ActionKind::Forward]);
            self.run(UP, BACKWARD);
        }
        // Drain: first the actions that other devices wait for, then the remaining weight gradients. The d
        // devices before this one still run after its last input gradient, so there is time for them.
        for _ in 0..d {
            self.run(DOWN, [ActionKind::InputGradient]);
            self.run(UP, [ActionKind::InputGradient]);
        }
        for _ in 0..p - d {
            self.run(DOWN, BACKWARD);
        }
        for way in [UP, DOWN] {
            while self.is_left(way, ActionKind::WeightGradient, m) {
                self.run(way, [ActionKind::WeightGradient]);
            }
        }
        self.list
    }

    fn run<const N: usize>(&mut self, way: usize, kinds: [ActionKind; N]) {
        for kind in kinds {
            let next = &mut self.next[way][kind as usize];
            self.list.push(Action::new(self.stages[way], kind, MicroBatchId::at(*next)));
            *next += 1;
        }
    }

    /// Returns whether the stage still has to run this kind for one of `m` micro-batches.
    fn is_left(&self, way: usize, kind: ActionKind, m: usize) -> bool {
        self.next[way][kind as usize] < m
    }
}
