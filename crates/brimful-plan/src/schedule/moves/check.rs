//! The rules of moves: nothing used before it is there, and never more in the slots than there are.

use std::collections::{BTreeMap, BTreeSet};

use super::super::{Action, ActionKind, MicroBatchId, StageId};
use super::error::{MoveError, MoveRule};
use super::make::{waiting, waits_on_host};
use super::{Home, Move, MoveKind, StageHome};

/// Whether there is a home for each stage, and a slot where one is needed.
pub(super) fn numbers(
    lists: &[Vec<Action>],
    homes: &[StageHome],
    slots: usize,
) -> Result<(), MoveError> {
    let last = lists.iter().flatten().map(|action| action.stage.index()).max();
    let needed = last.map_or(0, |last| last + 1);
    // The lists may be a part of the whole, so there may be homes of stages that others run.
    if homes.len() < needed {
        return Err(MoveError::WrongStages { given: homes.len(), needed });
    }
    let at_host = homes.iter().position(|home| home.weights == Home::Host);
    match at_host.filter(|_| slots == 0) {
        Some(j) => Err(MoveError::NoSlot { stage: StageId::at(j) }),
        None => Ok(()),
    }
}

/// Plays a device's actions and moves, and looks at every rule.
pub(super) fn list(
    list: &[Action],
    moves: &[Move],
    homes: &[StageHome],
    slots: usize,
) -> Result<(), MoveRule> {
    in_order(moves, list.len())?;
    let mut device =
        MovingState { homes, slots, waiting: waiting(list, homes), ..MovingState::default() };
    device.stages.extend(list.iter().map(|action| action.stage));
    let mut next = moves.iter().peekable();
    for (at, &action) in list.iter().enumerate() {
        while let Some(one) = next.next_if(|one| one.before == at) {
            device.start(*one)?;
        }
        device.run(action)?;
    }
    next.try_for_each(|one| device.start(*one))?;
    device.finish()
}

fn in_order(moves: &[Move], end: usize) -> Result<(), MoveRule> {
    let mut earliest = 0;
    for one in moves {
        if !(earliest..=end).contains(&one.before) {
            return Err(MoveRule::OutOfOrder(*one));
        }
        earliest = one.before;
    }
    Ok(())
}

/// What is where while the list is played.
#[derive(Default)]
struct MovingState<'a> {
    homes: &'a [StageHome],
    slots: usize,
    /// The stages of this device.
    stages: BTreeSet<StageId>,
    in_slots: BTreeSet<StageId>,
    /// Gradients that wait to go home, and those that went.
    summed: BTreeSet<StageId>,
    sent: BTreeMap<StageId, Move>,
    /// Micro-batches that are let go of between forward and recompute.
    waiting: BTreeSet<(StageId, MicroBatchId)>,
    boundaries: BTreeMap<Crossed, Passage>,
    gradients: BTreeMap<Crossed, Passage>,
}

/// What enters a stage for one micro-batch, or its gradient.
type Crossed = (StageId, MicroBatchId);

/// How far something that waits on the host has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Passage {
    /// On this device, by this action.
    Made(Action),
    OnHost,
    /// On this device, for whoever needs it.
    Back,
    UsedUp,
}

impl MovingState<'_> {
    fn start(&mut self, one: Move) -> Result<(), MoveRule> {
        if !self.may_move(one) {
            return Err(MoveRule::NotAtHost(one));
        }
        match one.kind {
            MoveKind::Fetch => self.fetch(one),
            MoveKind::Release if self.in_slots.remove(&one.stage) => Ok(()),
            MoveKind::Release => Err(MoveRule::NothingToRelease(one)),
            MoveKind::GradientsHome if self.summed.remove(&one.stage) => {
                self.sent.insert(one.stage, one);
                Ok(())
            }
            MoveKind::GradientsHome => Err(MoveRule::NoGradients(one)),
            MoveKind::BoundaryOut => send(&mut self.boundaries, one),
            MoveKind::GradientOut => send(&mut self.gradients, one),
            MoveKind::BoundaryIn => {
                let is_made_here = one.stage.before().is_none_or(|before| self.has(before));
                bring(&mut self.boundaries, one, is_made_here)
            }
            MoveKind::GradientIn => {
                let is_made_here = self.has(one.stage);
                bring(&mut self.gradients, one, is_made_here)
            }
        }
    }

    fn has(&self, stage: StageId) -> bool {
        self.stages.contains(&stage)
    }

    /// A boundary concerns the stage that it enters and the one before.
    fn may_move(&self, one: Move) -> bool {
        let Some(home) = self.homes.get(one.stage.index()) else { return false };
        let is_here = self.has(one.stage);
        match one.kind {
            MoveKind::Fetch | MoveKind::Release => is_here && home.weights == Home::Host,
            MoveKind::GradientsHome => is_here && home.weights == Home::Host && home.trained,
            _ => {
                let is_before = one.stage.before().is_some_and(|before| self.has(before));
                home.boundaries == Home::Host && (is_here || is_before)
            }
        }
    }

    fn fetch(&mut self, fetch: Move) -> Result<(), MoveRule> {
        if self.in_slots.contains(&fetch.stage) {
            return Err(MoveRule::FetchedTwice(fetch));
        }
        if self.in_slots.len() == self.slots {
            return Err(MoveRule::SlotsFull { fetch, slots: self.slots });
        }
        self.in_slots.insert(fetch.stage);
        Ok(())
    }

    fn run(&mut self, action: Action) -> Result<(), MoveRule> {
        let stage = action.stage;
        let home = self.homes[stage.index()];
        if home.weights == Home::Host && !self.in_slots.contains(&stage) {
            return Err(MoveRule::NotFetched(action));
        }
        if self.lacks(action) {
            return Err(MoveRule::BoundaryAway(action));
        }
        self.pass(action);
        if action.kind.releases() && home.weights == Home::Host && home.trained {
            if let Some(&gradients) = self.sent.get(&stage) {
                return Err(MoveRule::GradientsTooEarly { gradients, action });
            }
            self.summed.insert(stage);
        }
        Ok(())
    }

    /// Whether something that the action needs waits on the host.
    fn lacks(&self, action: Action) -> bool {
        let own = (action.stage, action.micro_batch);
        let next = (StageId(action.stage.0 + 1), action.micro_batch);
        let is_away = |place: Option<&Passage>| place != Some(&Passage::Back);
        match action.kind {
            ActionKind::Forward => {
                let came_by_bus = own.0 > StageId(0) && waits_on_host(self.homes, own.0);
                came_by_bus && is_away(self.boundaries.get(&own))
            }
            ActionKind::Recompute => {
                self.waiting.contains(&own) && is_away(self.boundaries.get(&own))
            }
            kind if kind.passes_gradient() => {
                waits_on_host(self.homes, next.0) && is_away(self.gradients.get(&next))
            }
            _ => false,
        }
    }

    /// What the action makes is to leave, and what it has used is gone.
    fn pass(&mut self, action: Action) {
        let own = (action.stage, action.micro_batch);
        let next = (StageId(action.stage.0 + 1), action.micro_batch);
        let is_first = action.stage == StageId(0);
        let (enters, leaves) =
            (waits_on_host(self.homes, own.0), waits_on_host(self.homes, next.0));
        let made = Passage::Made(action);
        if action.kind == ActionKind::Forward {
            if self.waiting.contains(&own) {
                // The model's own input has yet to leave; of others the host has a copy.
                self.boundaries.insert(own, if is_first { made } else { Passage::OnHost });
            }
            if leaves {
                self.boundaries.insert(next, made);
            }
        }
        if action.kind.passes_gradient() {
            if leaves {
                self.gradients.insert(next, Passage::UsedUp);
            }
            if enters && !is_first {
                self.gradients.insert(own, made);
            }
        }
        if action.kind.releases() && enters {
            self.boundaries.insert(own, Passage::UsedUp);
        }
    }

    fn finish(self) -> Result<(), MoveRule> {
        for passage in self.boundaries.values().chain(self.gradients.values()) {
            if let Passage::Made(action) = passage {
                return Err(MoveRule::BoundaryKept(*action));
            }
        }
        if let Some(&stage) = self.in_slots.first() {
            return Err(MoveRule::NeverReleased(stage));
        }
        self.summed.first().map_or(Ok(()), |&stage| Err(MoveRule::GradientsKept(stage)))
    }
}

/// Sends to the host what was made here.
fn send(places: &mut BTreeMap<Crossed, Passage>, one: Move) -> Result<(), MoveRule> {
    let place = one.micro_batch.and_then(|i| places.get_mut(&(one.stage, i)));
    match place {
        Some(place @ Passage::Made(_)) => {
            *place = Passage::OnHost;
            Ok(())
        }
        _ => Err(MoveRule::NothingToMove(one)),
    }
}

/// Brings something back that this device or another has sent.
fn bring(
    places: &mut BTreeMap<Crossed, Passage>,
    one: Move,
    is_made_here: bool,
) -> Result<(), MoveRule> {
    let crossed = one.micro_batch.map(|i| (one.stage, i)).ok_or(MoveRule::NothingToMove(one))?;
    match places.get(&crossed) {
        Some(Passage::OnHost) => {}
        None if !is_made_here => {}
        _ => return Err(MoveRule::NothingToMove(one)),
    }
    places.insert(crossed, Passage::Back);
    Ok(())
}
