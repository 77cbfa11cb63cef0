//! Zero-bubble V: two stages on each device, placed down and up again, with split backwards.
//!
//! Device d of p holds the stages d and 2p − 1 − d, so the first device also has the last stage,
//! whose gradient is there at once. Every device holds the same, p stages' worth, and at F = I = W
//! no device idles between its first action and its last. Here p = 2, m = 3:
//!
//! ```text
//! device 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 ·
//! device 1  ·   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
//! ```

use super::{Action, ActionKind, MicroBatchId, StageId};

/// The lists of `p` devices, two stages each, for `m` micro-batches.
///
/// The order needs 2p − 1 micro-batches to close its ranks. Of fewer, the rest is made and left out
/// again: an order without one of its micro-batches is still an order.
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

/// A device's two stages, the one on the way down and the one on the way up, and what each has
/// done.
#[derive(Debug)]
struct DeviceOrder {
    list: Vec<Action>,
    down: NextMicroBatches,
    up: NextMicroBatches,
}

/// The next micro-batch of each kind of action of one stage.
#[derive(Debug)]
struct NextMicroBatches {
    stage: StageId,
    forward: usize,
    input: usize,
    weight: usize,
}

impl DeviceOrder {
    fn new(p: usize, d: usize) -> Self {
        let down = NextMicroBatches::of(StageId::at(d));
        let up = NextMicroBatches::of(StageId::at(2 * p - 1 - d));
        Self { list: Vec::new(), down, up }
    }

    fn list(mut self, p: usize, d: usize, m: usize) -> Vec<Action> {
        // Fill the way down: a micro-batch is back here, at the stage on the way up, 2(p − d) − 1
        // ticks after it left, and one forward a tick keeps the device at work until then.
        self.down(ActionKind::Forward, 2 * (p - d) - 1);
        // Fill both ways: the gradient of a micro-batch is back 2d + 1 ticks after its forward on the
        // way up. That is d pairs of forwards, and the forward of the first whole turn.
        for _ in 0..d {
            self.up(ActionKind::Forward, 1);
            self.down(ActionKind::Forward, 1);
        }
        for _ in 0..p - d {
            self.up_all();
        }
        // Steady: each stage one forward and one whole backward in turn.
        while self.up.forward < m {
            self.down(ActionKind::Forward, usize::from(self.down.forward < m));
            self.down_backward();
            self.up_all();
        }
        // Drain: first what others wait for, then the weights that were left. The d devices before
        // this one still run when its last input gradient is sent: time enough for weight gradients.
        for _ in 0..d {
            self.down(ActionKind::InputGradient, 1);
            self.up(ActionKind::InputGradient, 1);
        }
        for _ in 0..p - d {
            self.down_backward();
        }
        self.up(ActionKind::WeightGradient, m - self.up.weight);
        self.down(ActionKind::WeightGradient, m - self.down.weight);
        self.list
    }

    fn up_all(&mut self) {
        for kind in [ActionKind::Forward, ActionKind::InputGradient, ActionKind::WeightGradient] {
            self.up(kind, 1);
        }
    }

    fn down_backward(&mut self) {
        self.down(ActionKind::InputGradient, 1);
        self.down(ActionKind::WeightGradient, 1);
    }

    fn down(&mut self, kind: ActionKind, times: usize) {
        self.list.extend((0..times).map(|_| self.down.next(kind)));
    }

    fn up(&mut self, kind: ActionKind, times: usize) {
        self.list.extend((0..times).map(|_| self.up.next(kind)));
    }
}

impl NextMicroBatches {
    fn of(stage: StageId) -> Self {
        Self { stage, forward: 0, input: 0, weight: 0 }
    }

    fn next(&mut self, kind: ActionKind) -> Action {
        let next = match kind {
            ActionKind::Forward => &mut self.forward,
            ActionKind::WeightGradient => &mut self.weight,
            _ => &mut self.input,
        };
        *next += 1;
        Action::new(self.stage, kind, MicroBatchId::at(*next - 1))
    }
}
