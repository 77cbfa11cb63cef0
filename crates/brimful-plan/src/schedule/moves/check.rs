//! The rules of moves: nothing used before it is there, and never more in the slots than there are.

use std::collections::{BTreeMap, BTreeSet};

use super::super::{Action, ActionKind, MicroBatchId, StageId};
use super::error::{MoveError, MoveRule};
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
    let mut device = MovingState { homes, slots, ..MovingState::default() };
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
    boundaries: BTreeMap<(StageId, MicroBatchId), Home>,
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
            MoveKind::BoundaryOut => self.carry(one, Home::Device, Home::Host),
            MoveKind::BoundaryIn => self.carry(one, Home::Host, Home::Device),
        }
    }

    fn may_move(&self, one: Move) -> bool {
        if !self.stages.contains(&one.stage) {
            return false;
        }
        let home = self.homes[one.stage.index()];
        match one.kind {
            MoveKind::Fetch | MoveKind::Release => home.weights == Home::Host,
            MoveKind::GradientsHome => home.weights == Home::Host && home.trained,
            MoveKind::BoundaryOut | MoveKind::BoundaryIn => home.boundaries == Home::Host,
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

    fn carry(&mut self, one: Move, from: Home, to: Home) -> Result<(), MoveRule> {
        let place = one.micro_batch.and_then(|i| self.boundaries.get_mut(&(one.stage, i)));
        match place {
            Some(place) if *place == from => {
                *place = to;
                Ok(())
            }
            _ => Err(MoveRule::NoBoundary(one)),
        }
    }

    fn run(&mut self, action: Action) -> Result<(), MoveRule> {
        let stage = action.stage;
        let home = self.homes[stage.index()];
        if home.weights == Home::Host && !self.in_slots.contains(&stage) {
            return Err(MoveRule::NotFetched(action));
        }
        let boundary = (stage, action.micro_batch);
        if action.kind == ActionKind::Forward {
            self.boundaries.insert(boundary, Home::Device);
        } else if self.boundaries.get(&boundary) == Some(&Home::Host) {
            return Err(MoveRule::BoundaryAway(action));
        }
        if action.kind.releases() && home.weights == Home::Host && home.trained {
            if let Some(&gradients) = self.sent.get(&stage) {
                return Err(MoveRule::GradientsTooEarly { gradients, action });
            }
            self.summed.insert(stage);
        }
        Ok(())
    }

    fn finish(self) -> Result<(), MoveRule> {
        if let Some(&stage) = self.in_slots.first() {
            return Err(MoveRule::NeverReleased(stage));
        }
        self.summed.first().map_or(Ok(()), |&stage| Err(MoveRule::GradientsKept(stage)))
    }
}
