//! Rules of a single stage: each action once, in the order in which a micro-batch goes through them.

use std::collections::BTreeMap;

use super::super::{Action, ActionKind, DeviceId, MicroBatchId, Rule, StageId};
use super::violation::Violation;

/// Kinds of actions that a stage has done with a micro-batch: one bit for each.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct KindSet(u8);

impl KindSet {
    pub(crate) fn has(self, kind: ActionKind) -> bool {
        self.0 & (1 << kind as u8) != 0
    }

    fn add(&mut self, kind: ActionKind) {
        self.0 |= 1 << kind as u8;
    }

    /// Returns the kind that is still missing, if any.
    fn missing(self) -> Option<ActionKind> {
        let split = self.has(ActionKind::InputGradient) || self.has(ActionKind::WeightGradient);
        let needed: &[ActionKind] = if split {
            &[ActionKind::Forward, ActionKind::InputGradient, ActionKind::WeightGradient]
        } else {
            &[ActionKind::Forward, ActionKind::Backward]
        };
        needed.iter().copied().find(|&kind| !self.has(kind))
    }
}

/// Order of the actions, as checked stage by stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Order {
    pub(crate) micro_batches: usize,
    pub(crate) device_of: Vec<DeviceId>,
    done: Vec<KindSet>,
}

pub(super) fn check(lists: &[Vec<Action>]) -> Result<Order, Violation> {
    let (stages, micro_batches) = size(lists)?;
    let mut order = Order {
        micro_batches,
        device_of: vec![NOWHERE; stages],
        done: vec![KindSet::default(); stages * micro_batches],
    };
    for (device, list) in lists.iter().enumerate() {
        for (position, &action) in list.iter().enumerate() {
            let device = DeviceId::at(device);
            order.take(action, device).map_err(|rule| Violation::at(rule, device, position))?;
        }
    }
    match order.done.iter().all(|done| done.missing().is_none()) {
        true => Ok(order),
        false => Err(first_gap(lists, micro_batches)),
    }
}

/// Device of a stage that has not been seen.
const NOWHERE: DeviceId = DeviceId(u32::MAX);

/// Returns the numbers of stages and micro-batches, only if there are enough actions for all of them:
/// numbers from a file must not determine how much memory is allocated.
fn size(lists: &[Vec<Action>]) -> Result<(usize, usize), Violation> {
    let idle = lists.iter().position(Vec::is_empty).map(DeviceId::at);
    if let Some(device) = idle {
        return Err(Violation::at(Rule::IdleDevice(device), device, 0));
    }
    let actions = || lists.iter().flatten();
    let Some(last_stage) = actions().map(|a| a.stage).max() else {
        return Err(Violation { rule: Rule::Empty, marks: Vec::new() });
    };
    let last_micro_batch = actions().map(|a| a.micro_batch).max().unwrap_or_default();
    let (stages, micro_batches) = (last_stage.index() + 1, last_micro_batch.index() + 1);
    // Each pair needs a forward and a backward at least; 128 bits, because both numbers may come from a
    // file and be as large as 32 bits allow.
    let pairs = stages as u128 * micro_batches as u128;
    if pairs * 2 > actions().count() as u128 {
        return Err(first_gap(lists, micro_batches));
    }
    Ok((stages, micro_batches))
}

/// Returns the first missing action; at least one must be missing.
fn first_gap(lists: &[Vec<Action>], micro_batches: usize) -> Violation {
    let mut done = BTreeMap::<(usize, usize), KindSet>::new();
    for action in lists.iter().flatten() {
        let pair = (action.stage.index(), action.micro_batch.index());
        done.entry(pair).or_default().add(action.kind);
    }
    let pairs = (0..).flat_map(|j| (0..micro_batches).map(move |i| (j, i)));
    let gap = pairs.into_iter().find_map(|pair| {
        let kind = done.get(&pair).copied().unwrap_or_default().missing()?;
        Some(Action::new(StageId::at(pair.0), kind, MicroBatchId::at(pair.1)))
    });
    let action = gap.expect("the endless walk over the pairs meets a gap");
    let holds_stage = |list: &Vec<Action>| list.iter().any(|other| other.stage == action.stage);
    let device = lists.iter().position(holds_stage).unwrap_or(lists.len() - 1);
    Violation::at(Rule::Missing(action), DeviceId::at(device), lists[device].len())
}

impl Order {
    /// Returns the kinds of actions that the stage has done with the micro-batch.
    pub(crate) fn done(&self, stage: StageId, micro_batch: MicroBatchId) -> KindSet {
        self.done[stage.index() * self.micro_batches + micro_batch.index()]
    }

    fn take(&mut self, action: Action, device: DeviceId) -> Result<(), Rule> {
        self.place(action.stage, device)?;
        let done = self.done(action.stage, action.micro_batch);
        if done.has(action.kind) {
            return Err(Rule::Doubled(action));
        }
        follows(done, action)?;
        let cell = action.stage.index() * self.micro_batches + action.micro_batch.index();
        self.done[cell].add(action.kind);
        Ok(())
    }

    fn place(&mut self, stage: StageId, device: DeviceId) -> Result<(), Rule> {
        let first = &mut self.device_of[stage.index()];
        if *first == NOWHERE {
            *first = device;
        }
        if *first == device {
            return Ok(());
        }
        Err(Rule::TwoDevices { stage, first: *first, second: device })
    }
}

/// Checks that the action may follow the kinds of actions that its stage has done with the micro-batch.
fn follows(done: KindSet, action: Action) -> Result<(), Rule> {
    let too_early = |needs| Err(Rule::TooEarly { action, needs });
    let begun = done.has(ActionKind::Backward) || done.has(ActionKind::InputGradient);
    match action.kind {
        ActionKind::Forward => Ok(()),
        _ if !done.has(ActionKind::Forward) => too_early(ActionKind::Forward),
        ActionKind::Recompute if begun => Err(Rule::RecomputeTooLate(action)),
        ActionKind::Recompute => Ok(()),
        // The remaining kinds are backwards, whole or split.
        _ if done.has(ActionKind::Backward) => Err(Rule::MixedBackward(action)),
        ActionKind::Backward if begun => Err(Rule::MixedBackward(action)),
        ActionKind::WeightGradient if !begun => too_early(ActionKind::InputGradient),
        _ => Ok(()),
    }
}
