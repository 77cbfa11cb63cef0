//! The rules of moves: nothing used before it is there, and never more in the slots than there are.

use std::collections::{BTreeMap, BTreeSet};

use super::super::{Action, ActionKind, MicroBatchId, StageId};
use super::error::{MoveError, MoveRule};
use super::make::{waiting, waits_on_host};
use super::{Home, Move, MoveKind, Moved, StageHome};

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
    /// Of what enters stages, and of its gradients.
    passages: BTreeMap<Moved, Passage>,
}

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
            MoveKind::BoundaryOut | MoveKind::GradientOut => self.send(one),
            MoveKind::BoundaryIn => {
                let is_made_here = one.stage.before().is_none_or(|before| self.has(before));
                self.bring(one, is_made_here)
            }
            MoveKind::GradientIn => self.bring(one, self.has(one.stage)),
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
        let Action { stage, micro_batch, .. } = action;
        let next = StageId(stage.0 + 1);
        let is_away = |moved: Moved| self.passages.get(&moved) != Some(&Passage::Back);
        let input = Moved::Boundary(stage, micro_batch);
        match action.kind {
            ActionKind::Forward => {
                let came_by_bus = stage > StageId(0) && waits_on_host(self.homes, stage);
                came_by_bus && is_away(input)
            }
            ActionKind::Recompute => self.waiting.contains(&(stage, micro_batch)) && is_away(input),
            kind if kind.passes_gradient() => {
                waits_on_host(self.homes, next) && is_away(Moved::Gradient(next, micro_batch))
            }
            _ => false,
        }
    }

    /// What the action makes is to leave, and what it has used is gone.
    fn pass(&mut self, action: Action) {
        let Action { kind, stage, micro_batch } = action;
        let next = StageId(stage.0 + 1);
        let is_first = stage == StageId(0);
        let (enters, leaves) = (waits_on_host(self.homes, stage), waits_on_host(self.homes, next));
        let made = Passage::Made(action);
        if kind == ActionKind::Forward {
            if self.waiting.contains(&(stage, micro_batch)) {
                // The model's own input has yet to leave; of others the host has a copy.
                let place = if is_first { made } else { Passage::OnHost };
                self.passages.insert(Moved::Boundary(stage, micro_batch), place);
            }
            if leaves {
                self.passages.insert(Moved::Boundary(next, micro_batch), made);
            }
        }
        if kind.passes_gradient() {
            if leaves {
                self.passages.insert(Moved::Gradient(next, micro_batch), Passage::UsedUp);
            }
            if enters && !is_first {
                self.passages.insert(Moved::Gradient(stage, micro_batch), made);
            }
        }
        if kind.releases() && enters {
            self.passages.insert(Moved::Boundary(stage, micro_batch), Passage::UsedUp);
        }
    }

    fn finish(self) -> Result<(), MoveRule> {
        for passage in self.passages.values() {
            if let Passage::Made(action) = passage {
                return Err(MoveRule::BoundaryKept(*action));
            }
        }
        if let Some(&stage) = self.in_slots.first() {
            return Err(MoveRule::NeverReleased(stage));
        }
        self.summed.first().map_or(Ok(()), |&stage| Err(MoveRule::GradientsKept(stage)))
    }

    /// Sends to the host what was made here.
    fn send(&mut self, one: Move) -> Result<(), MoveRule> {
        match self.passages.get_mut(&Moved::of(one)) {
            Some(place @ Passage::Made(_)) => {
                *place = Passage::OnHost;
                Ok(())
            }
            _ => Err(MoveRule::NothingToMove(one)),
        }
    }

    /// Brings something back that this device or another has sent.
    fn bring(&mut self, one: Move, is_made_here: bool) -> Result<(), MoveRule> {
        match (one.micro_batch, self.passages.get(&Moved::of(one))) {
            (Some(_), Some(Passage::OnHost)) => {}
            (Some(_), None) if !is_made_here => {}
            _ => return Err(MoveRule::NothingToMove(one)),
        }
        self.passages.insert(Moved::of(one), Passage::Back);
        Ok(())
    }
}
