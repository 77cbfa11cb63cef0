//! State of a device while actions are reordered.

use std::collections::{BTreeSet, VecDeque};

use super::super::{Action, ActionKind, DeviceId, StageId};

/// Urgency of an action, the smallest first: a class, and a number within the class.
pub(in super::super) type Rank = (u8, i64);

#[derive(Default)]
pub(super) struct DeviceState {
    pub(super) queues: Vec<ActionQueue>,
    /// Devices that send to this one, or that it sends to.
    pub(super) neighbours: BTreeSet<DeviceId>,
    /// Current action, and the tick of its end.
    pub(super) running: Option<(Action, u64)>,
    /// Number of micro-batches whose activations it holds.
    pub(super) held: usize,
    /// Index of the queue that it has promised to take from next.
    pub(super) promised: Option<usize>,
    pub(super) done: Vec<Action>,
}

/// Pending actions of one kind on one stage, in order.
pub(super) struct ActionQueue {
    stage: StageId,
    kind: ActionKind,
    pub(super) pending: VecDeque<(Rank, Action)>,
}

impl DeviceState {
    pub(super) fn new(list: &[Action], rank: impl Fn(usize, Action) -> Rank) -> Self {
        let mut device = Self::default();
        for (position, &action) in list.iter().enumerate() {
            let queue = device.queue(action.stage, action.kind).unwrap_or_else(|| {
                let Action { stage, kind, .. } = action;
                device.queues.push(ActionQueue { stage, kind, pending: VecDeque::new() });
                device.queues.len() - 1
            });
            device.queues[queue].pending.push_back((rank(position, action), action));
        }
        device
    }

    pub(super) fn queue(&self, stage: StageId, kind: ActionKind) -> Option<usize> {
        self.queues.iter().position(|queue| queue.stage == stage && queue.kind == kind)
    }

    pub(super) fn is_done(&self) -> bool {
        self.queues.iter().all(|queue| queue.pending.is_empty())
    }

    /// Returns whether the input of an action was made on this device, for an action that takes no input
    /// from a channel.
    pub(super) fn has_made_input(&self, action: Action) -> bool {
        let made_by = match action.kind {
            ActionKind::Forward => return true,
            ActionKind::WeightGradient => ActionKind::InputGradient,
            _ => ActionKind::Forward,
        };
        // All kinds of a stage run the micro-batches in one order, so the numbers of pending actions show whether
        // this action's input was made.
        self.left(action.stage, made_by) < self.left(action.stage, action.kind)
    }

    fn left(&self, stage: StageId, kind: ActionKind) -> usize {
        self.queue(stage, kind).map_or(0, |queue| self.queues[queue].pending.len())
    }
}

/// Returns the largest number of activations that a list holds at one time.
pub(super) fn most_held(list: &[Action]) -> usize {
    let mut now = 0;
    let mut most = 0;
    for action in list {
        now += usize::from(action.kind == ActionKind::Forward);
        most = most.max(now);
        now -= usize::from(action.kind.releases());
    }
    most
}
