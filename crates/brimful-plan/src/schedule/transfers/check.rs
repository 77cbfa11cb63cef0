//! Validates transfers: all data are in place before their use, and each stage in a device buffer has a
//! buffer of its own.

use std::collections::{BTreeMap, BTreeSet};

use super::super::{Action, ActionKind, MicroBatchId, StageId};
use super::error::{TransferError, TransferRule};
use super::make::{waiting, waits_on_host};
use super::{Location, Payload, StageLocation, Transfer, TransferKind};

/// Checks that there is a location for each stage, and a device buffer if one is needed.
pub(super) fn numbers(
    lists: &[Vec<Action>],
    locations: &[StageLocation],
    device_buffers: usize,
) -> Result<(), TransferError> {
    let last = lists.iter().flatten().map(|action| action.stage.index()).max();
    let needed = last.map_or(0, |last| last + 1);
    // The lists may be a part of the schedule, so there may be locations of stages without actions.
    if locations.len() < needed {
        return Err(TransferError::WrongStages { given: locations.len(), needed });
    }
    let at_host = locations.iter().position(|location| location.weights == Location::Host);
    match at_host.filter(|_| device_buffers == 0) {
        Some(j) => Err(TransferError::NoDeviceBuffer { stage: StageId::at(j) }),
        None => Ok(()),
    }
}

/// Plays a device's actions and transfers, and checks every rule.
pub(super) fn list(
    list: &[Action],
    transfers: &[Transfer],
    locations: &[StageLocation],
    device_buffers: usize,
) -> Result<(), TransferRule> {
    in_order(transfers, list.len())?;
    let mut device = MovingState {
        locations,
        device_buffers,
        waiting: waiting(list, locations),
        ..MovingState::default()
    };
    device.stages.extend(list.iter().map(|action| action.stage));
    let mut next = transfers.iter().peekable();
    for (at, &action) in list.iter().enumerate() {
        while let Some(one) = next.next_if(|one| one.before == at) {
            device.start(*one)?;
        }
        device.run(action)?;
    }
    next.try_for_each(|one| device.start(*one))?;
    device.finish()
}

fn in_order(transfers: &[Transfer], end: usize) -> Result<(), TransferRule> {
    let mut earliest = 0;
    for one in transfers {
        if !(earliest..=end).contains(&one.before) {
            return Err(TransferRule::OutOfOrder(*one));
        }
        earliest = one.before;
    }
    Ok(())
}

/// State of a device while its list is played.
#[derive(Default)]
struct MovingState<'a> {
    locations: &'a [StageLocation],
    device_buffers: usize,
    /// Stages of this device.
    stages: BTreeSet<StageId>,
    in_buffers: BTreeSet<StageId>,
    /// Stages with gradients to send to the host, and those already sent.
    summed: BTreeSet<StageId>,
    sent: BTreeMap<StageId, Transfer>,
    /// Micro-batches whose input is freed between forward and recompute.
    waiting: BTreeSet<(StageId, MicroBatchId)>,
    /// State of boundaries and of their gradients.
    passages: BTreeMap<Payload, Passage>,
}

/// State of a boundary or gradient that is offloaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Passage {
    /// Made on this device by this action.
    Made(Action),
    OnHost,
    /// Back on this device.
    Back,
    UsedUp,
}

impl MovingState<'_> {
    fn start(&mut self, one: Transfer) -> Result<(), TransferRule> {
        if !self.may_transfer(one) {
            return Err(TransferRule::NotAtHost(one));
        }
        match one.kind {
            TransferKind::Fetch => self.fetch(one),
            TransferKind::Release if self.in_buffers.remove(&one.stage) => Ok(()),
            TransferKind::Release => Err(TransferRule::NothingToRelease(one)),
            TransferKind::OffloadGradients if self.summed.remove(&one.stage) => {
                self.sent.insert(one.stage, one);
                Ok(())
            }
            TransferKind::OffloadGradients => Err(TransferRule::NoGradients(one)),
            TransferKind::BoundaryOut | TransferKind::GradientOut => self.send(one),
            TransferKind::BoundaryIn => {
                let is_made_here = one.stage.before().is_none_or(|before| self.has(before));
                self.bring(one, is_made_here)
            }
            TransferKind::GradientIn => self.bring(one, self.has(one.stage)),
            TransferKind::FetchState | TransferKind::OffloadState => {
                Err(TransferRule::NotAtHost(one))
            }
        }
    }

    fn has(&self, stage: StageId) -> bool {
        self.stages.contains(&stage)
    }

    /// Returns whether this device may run the transfer. A boundary may be transferred by the device of its stage,
    /// and by that of the previous stage.
    fn may_transfer(&self, one: Transfer) -> bool {
        let Some(location) = self.locations.get(one.stage.index()) else { return false };
        let is_here = self.has(one.stage);
        match one.kind {
            TransferKind::Fetch | TransferKind::Release => {
                is_here && location.weights == Location::Host
            }
            TransferKind::OffloadGradients => {
                is_here && location.weights == Location::Host && location.trained
            }
            _ => {
                let is_before = one.stage.before().is_some_and(|before| self.has(before));
                location.boundaries == Location::Host && (is_here || is_before)
            }
        }
    }

    fn fetch(&mut self, fetch: Transfer) -> Result<(), TransferRule> {
        if self.in_buffers.contains(&fetch.stage) {
            return Err(TransferRule::FetchedTwice(fetch));
        }
        if self.in_buffers.len() == self.device_buffers {
            return Err(TransferRule::DeviceBuffersFull {
                fetch,
                device_buffers: self.device_buffers,
            });
        }
        self.in_buffers.insert(fetch.stage);
        Ok(())
    }

    fn run(&mut self, action: Action) -> Result<(), TransferRule> {
        let stage = action.stage;
        let location = self.locations[stage.index()];
        if location.weights == Location::Host && !self.in_buffers.contains(&stage) {
            return Err(TransferRule::NotFetched(action));
        }
        if self.lacks(action) {
            return Err(TransferRule::BoundaryAway(action));
        }
        self.pass(action);
        if action.kind.releases() && location.weights == Location::Host && location.trained {
            if let Some(&gradients) = self.sent.get(&stage) {
                return Err(TransferRule::GradientsTooEarly { gradients, action });
            }
            self.summed.insert(stage);
        }
        Ok(())
    }

    /// Returns whether the action needs data that are still on the host.
    fn lacks(&self, action: Action) -> bool {
        let Action { stage, micro_batch, .. } = action;
        let next = StageId(stage.0 + 1);
        let is_away = |transfer: Payload| self.passages.get(&transfer) != Some(&Passage::Back);
        let input = Payload::Boundary(stage, micro_batch);
        match action.kind {
            ActionKind::Forward => {
                let came_over_host_link =
                    stage > StageId(0) && waits_on_host(self.locations, stage);
                came_over_host_link && is_away(input)
            }
            ActionKind::Recompute => self.waiting.contains(&(stage, micro_batch)) && is_away(input),
            kind if kind.passes_gradient() => {
                waits_on_host(self.locations, next) && is_away(Payload::Gradient(next, micro_batch))
            }
            _ => false,
        }
    }

    /// Marks the action's output as made, and its inputs as used up.
    fn pass(&mut self, action: Action) {
        let Action { kind, stage, micro_batch } = action;
        let next = StageId(stage.0 + 1);
        let is_first = stage == StageId(0);
        let (enters, leaves) =
            (waits_on_host(self.locations, stage), waits_on_host(self.locations, next));
        let made = Passage::Made(action);
        if kind == ActionKind::Forward {
            if self.waiting.contains(&(stage, micro_batch)) {
                // The model's own input still has to be sent. The host has copies of the other stages' inputs.
                let place = if is_first { made } else { Passage::OnHost };
                self.passages.insert(Payload::Boundary(stage, micro_batch), place);
            }
            if leaves {
                self.passages.insert(Payload::Boundary(next, micro_batch), made);
            }
        }
        if kind.passes_gradient() {
            if leaves {
                self.passages.insert(Payload::Gradient(next, micro_batch), Passage::UsedUp);
            }
            if enters && !is_first {
                self.passages.insert(Payload::Gradient(stage, micro_batch), made);
            }
        }
        if kind.releases() && enters {
            self.passages.insert(Payload::Boundary(stage, micro_batch), Passage::UsedUp);
        }
    }

    fn finish(self) -> Result<(), TransferRule> {
        for passage in self.passages.values() {
            if let Passage::Made(action) = passage {
                return Err(TransferRule::BoundaryKept(*action));
            }
        }
        if let Some(&stage) = self.in_buffers.first() {
            return Err(TransferRule::NeverReleased(stage));
        }
        self.summed.first().map_or(Ok(()), |&stage| Err(TransferRule::GradientsKept(stage)))
    }

    /// Sends data made here to the host.
    fn send(&mut self, one: Transfer) -> Result<(), TransferRule> {
        match self.passages.get_mut(&Payload::of(one)) {
            Some(place @ Passage::Made(_)) => {
                *place = Passage::OnHost;
                Ok(())
            }
            _ => Err(TransferRule::NothingToTransfer(one)),
        }
    }

    /// Brings data back that this device or another has sent.
    fn bring(&mut self, one: Transfer, is_made_here: bool) -> Result<(), TransferRule> {
        match (one.micro_batch, self.passages.get(&Payload::of(one))) {
            (Some(_), Some(Passage::OnHost)) => {}
            (Some(_), None) if !is_made_here => {}
            _ => return Err(TransferRule::NothingToTransfer(one)),
        }
        self.passages.insert(Payload::of(one), Passage::Back);
        Ok(())
    }
}
