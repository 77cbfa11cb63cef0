//! Where what waits for a later action waits: on the device while that has room, then on the host.
//!
//! Where micro-batches meet, all of them pass a stage before the first passes the next, so what waits grows
//! with the mini-batch. The first step of a size leaves nothing on the device, and shows by its peak what the
//! work itself takes; from then on that much is left free, and what waits may have the rest. What the very next
//! stage takes comes first: it would cross the bus and come straight back. What a backward needs much later
//! crosses it once each way. What is on its way to the host has its memory until it is there, so compute waits for
//! it rather than for room that a full device would have to look for. Where memory runs out all the same, because
//! an allocator cannot join what is free, a step of a given size runs again with nothing waiting here, and more is left
//! free later.

use std::collections::VecDeque;
use std::sync::Arc;

use brimful_torch::stream::{Event, Stream};
use tch::Device;

use super::move_clock::MoveClock;
use super::stage::Boundary;
use crate::Result;
use crate::batch::tensor_bytes;
use crate::bytes::Bytes;
use crate::memory::Memory;
use crate::schedule::Awaited;

/// Of so many sixteenths of all memory that are left free for what an allocator cannot join, nothing waits here.
const ALL_APART: u64 = 16;

/// How many actions the host may be ahead of the device.
const AHEAD: usize = 3;

/// When the device has come to the last few actions, so that the host is not far ahead: what they free
/// can be used again only when they are done.
#[derive(Debug)]
pub(crate) struct HostLead {
    device: Device,
    reached: VecDeque<Event>,
}

impl HostLead {
    pub(crate) fn new(device: Device) -> Self {
        Self { device, reached: VecDeque::new() }
    }

    /// Waits until the device is at most a few actions behind.
    pub(crate) fn keep(&mut self) -> Result<()> {
        if self.device == Device::Cpu {
            return Ok(());
        }
        if self.reached.len() == AHEAD
            && let Some(earliest) = self.reached.pop_front()
        {
            earliest.synchronize()?;
        }
        self.reached.push_back(Event::after(Stream::current(self.device)?)?);
        Ok(())
    }
}

/// What is on its way to the host, the earliest first: until it is there its memory cannot be used again,
/// though it counts as free from the time on when nobody has the tensor.
#[derive(Debug, Default)]
pub(crate) struct Leaving {
    parcels: VecDeque<(Arc<Event>, u64)>,
}

impl Leaving {
    /// So many bytes are there at this event.
    pub(crate) fn add(&mut self, there: Arc<Event>, bytes: u64) -> Result<()> {
        self.forget_arrived()?;
        self.parcels.push_back((there, bytes));
        Ok(())
    }

    /// What is under way still.
    fn bytes(&mut self) -> Result<u64> {
        self.forget_arrived()?;
        Ok(self.parcels.iter().map(|(_, bytes)| bytes).sum())
    }

    fn forget_arrived(&mut self) -> Result<()> {
        while let Some((there, _)) = self.parcels.front()
            && there.is_reached()?
        {
            self.parcels.pop_front();
        }
        Ok(())
    }

    /// Waits for the earliest; gives its bytes.
    fn wait(&mut self) -> Result<Option<u64>> {
        let Some((there, bytes)) = self.parcels.pop_front() else { return Ok(None) };
        there.synchronize()?;
        Ok(Some(bytes))
    }
}

/// A device's memory, as a place to wait in.
#[derive(Debug)]
pub(crate) struct WaitingRoom {
    memory: Memory,
    /// Whether activations wait too, and are computed again only where there is no room.
    keeps_activations: bool,
    known: Option<WorkNeed>,
    /// The largest step all of which has waited here.
    fitted: Option<StepExtent>,
    /// How many sixteenths of all memory are left free besides, for what the allocator cannot join.
    apart: u64,
    /// The step under way.
    step: Option<WaitingStep>,
    space: Space,
}

/// How large a step is, in samples.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepExtent {
    pub(crate) largest_micro_batch: u64,
    pub(crate) mini_batch: u64,
}

/// What the work takes with micro-batches of at most so many samples.
#[derive(Debug, Clone, Copy)]
struct WorkNeed {
    samples: u64,
    bytes: u64,
    /// What enters a stage, at most.
    boundary: u64,
}

#[derive(Debug)]
struct WaitingStep {
    trains: bool,
    extent: StepExtent,
    /// In use at its start.
    start: u64,
    /// What its work takes, where that is known.
    work: Option<u64>,
    /// What all micro-batches bring to a stage, at most.
    frontier: u64,
    /// The most that entered a stage so far.
    boundary: u64,
    /// Whether something may have waited here that could have waited on the host.
    takes_room: bool,
    /// Whether there was room for all at every action so far.
    fits: bool,
}

/// How much room there is at the action under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Space {
    None,
    /// For what goes from stage to stage.
    ForParcels,
    /// For what has entered a stage too, until its backward.
    ForInputs,
    /// For its activations too.
    ForAll,
}

impl WaitingRoom {
    pub(crate) fn new(memory: Memory, keeps_activations: bool) -> Self {
        let apart = u64::from(matches!(memory, Memory::Accelerator(_)));
        let (known, fitted, step) = (None, None, None);
        Self { memory, keeps_activations, known, fitted, apart, step, space: Space::None }
    }

    /// A step begins.
    pub(crate) fn begin(&mut self, trains: bool, extent: StepExtent) -> Result<()> {
        // One that did not come to its end may have lacked what was taken here.
        if self.step.take().is_some() {
            (self.known, self.fitted) = (None, None);
        }
        let known = self.known.filter(|known| extent.largest_micro_batch <= known.samples);
        let usage = self.memory.usage()?;
        // It does not change while a step is under way where nothing limits it, where one as large had room
        // enough, or where nothing is known yet.
        self.space = match (usage.limit, self.fitted) {
            (None, _) => Space::ForAll,
            (_, Some(fitted)) if extent.is_within(fitted) => Space::ForAll,
            _ => Space::None,
        };
        let work = known.map(|known| known.bytes).filter(|_| self.space == Space::None);
        let takes_room = usage.limit.is_some() && self.space == Space::ForAll;
        self.step = Some(WaitingStep {
            trains,
            extent,
            start: usage.current.0,
            work,
            frontier: known.map_or(0, |known| known.boundary * extent.micro_batches()),
            boundary: 0,
            takes_room,
            fits: work.is_some(),
        });
        Ok(())
    }

    /// A step has run out of memory. Says whether the same may do with less, because nothing waits here next time.
    pub(crate) fn make_room(&mut self) -> bool {
        let took_room = self.step.as_ref().is_some_and(|step| step.takes_room);
        if took_room {
            self.apart = (2 * self.apart).clamp(1, ALL_APART);
        }
        took_room
    }

    /// Learns how much enters a stage.
    pub(crate) fn note(&mut self, entered: &Boundary) {
        if let Some(step) = &mut self.step {
            step.boundary = step.boundary.max(entered.all().map(tensor_bytes).sum());
        }
    }

    /// Looks how much room there is, for the next action; where that is too little for what the next stage takes,
    /// there may be more when what leaves is gone.
    pub(crate) fn look(&mut self, leaving: &mut Leaving, clock: &mut MoveClock) -> Result<()> {
        let Some((step, work)) = self.step.as_mut().and_then(|step| step.work.map(|w| (step, w)))
        else {
            return Ok(());
        };
        let usage = self.memory.usage()?;
        let [available, limit] =
            [usage.available, usage.limit].map(|b| b.map_or(u64::MAX, |b| b.0));
        // An eighth more, because micro-batches differ, and what the allocator cannot join.
        let left_free = work + work / 8 + limit / ALL_APART * self.apart;
        // Where all micro-batches would never have room, room for the work is enough.
        let all = left_free.saturating_add(step.frontier);
        let wanted = if all <= available { all } else { left_free };
        let mut free = available.saturating_sub(leaving.bytes()?);
        if free < wanted {
            clock.waiting(Awaited::Boundaries, || {
                while free < wanted
                    && let Some(gone) = leaving.wait()?
                {
                    free += gone;
                }
                Ok(())
            })?;
        }
        self.space = match free.checked_sub(left_free) {
            None => Space::None,
            Some(spare) if spare < step.frontier => Space::ForParcels,
            // Activations are not more than all that the work takes.
            Some(spare) if spare < step.frontier + left_free => Space::ForInputs,
            Some(_) => Space::ForAll,
        };
        step.fits &= self.space == Space::ForAll;
        step.takes_room |= self.space > Space::None;
        Ok(())
    }

    /// Whether activations wait, so that nothing is computed again.
    pub(crate) fn keeps_activations(&self) -> bool {
        self.keeps_activations && self.space == Space::ForAll
    }

    /// Whether what has entered a stage stays here until its backward.
    pub(crate) fn keeps_inputs(&self) -> bool {
        self.space >= Space::ForInputs
    }

    /// Whether parcels have to wait on the host.
    pub(crate) fn is_full(&self) -> bool {
        self.space == Space::None
    }

    /// The step has come to its end with this peak; gives what it needs at least.
    pub(crate) fn end(&mut self, peak: Bytes) -> Bytes {
        let Some(step) = self.step.take() else { return peak };
        let WaitingStep { trains, extent, start, work, boundary, fits, .. } = step;
        if trains && fits {
            self.fitted = Some(extent);
        }
        if trains && work.is_none() && self.space == Space::None {
            let samples = extent.largest_micro_batch;
            self.known = Some(WorkNeed { samples, bytes: peak.0.saturating_sub(start), boundary });
        }
        match self.known {
            Some(known) => peak.min(Bytes(start + known.bytes)),
            None => peak,
        }
    }
}

impl StepExtent {
    fn micro_batches(self) -> u64 {
        self.mini_batch.div_ceil(self.largest_micro_batch.max(1))
    }

    fn is_within(self, other: Self) -> bool {
        self.largest_micro_batch <= other.largest_micro_batch && self.mini_batch <= other.mini_batch
    }
}
