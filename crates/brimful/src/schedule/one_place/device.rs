//! A device in play: its wishes, what it runs and holds, and what it has done.

use std::collections::{BTreeSet, VecDeque};

use super::super::{Action, DeviceId, Kind, StageId};

/// How urgent a wish is, the smallest first: by its class, and by a number within the class.
pub(in super::super) type Rank = (u8, i64);

#[derive(Default)]
pub(super) struct Device {
    pub(super) lanes: Vec<Lane>,
    /// Who sends to it.
    pub(super) neighbours: BTreeSet<DeviceId>,
    pub(super) running: Option<(Action, u64)>,
    pub(super) held: usize,
    /// The lane that it has promised to take from next.
    pub(super) promise: Option<usize>,
    pub(super) done: Vec<Action>,
}

/// The wishes of one kind on one stage, in their order.
pub(super) struct Lane {
    stage: StageId,
    kind: Kind,
    pub(super) wishes: VecDeque<(Rank, Action)>,
}

impl Device {
    pub(super) fn new(list: &[Action], rank: impl Fn(usize, Action) -> Rank) -> Self {
        let mut device = Self::default();
        for (position, &action) in list.iter().enumerate() {
            let lane = device.lane(action.stage, action.kind).unwrap_or_else(|| {
                let Action { stage, kind, .. } = action;
                device.lanes.push(Lane { stage, kind, wishes: VecDeque::new() });
                device.lanes.len() - 1
            });
            device.lanes[lane].wishes.push_back((rank(position, action), action));
        }
        device
    }

    pub(super) fn lane(&self, stage: StageId, kind: Kind) -> Option<usize> {
        self.lanes.iter().position(|lane| lane.stage == stage && lane.kind == kind)
    }

    /// Of an action that takes from no channel: whether what it needs was made here.
    pub(super) fn has_made_input(&self, action: Action) -> bool {
        let made_by = match action.kind {
            Kind::Forward => return true,
            Kind::WeightGradient => Kind::InputGradient,
            _ => Kind::Forward,
        };
        let left = |kind| {
            let lane = self.lane(action.stage, kind);
            lane.map_or(0, |lane| self.lanes[lane].wishes.len())
        };
        left(made_by) < left(action.kind)
    }
}

/// The most activations that a list holds at one time.
pub(super) fn most_held(list: &[Action]) -> usize {
    let (mut now, mut most) = (0, 0);
    for action in list {
        now += usize::from(action.kind == Kind::Forward);
        most = most.max(now);
        now -= usize::from(action.kind.releases());
    }
    most
}
