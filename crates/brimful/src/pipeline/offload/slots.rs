//! Device buffers for offloaded stages, filled in turn and reused.

use brimful_torch::stream::{Event, Stream};
use tch::{Device, Kind, Tensor};

use super::OffloadedStage;
use crate::Result;
use crate::pipeline::run::MoveClock;
use crate::schedule::{Awaited, Move};

/// Device buffers of a worker.
#[derive(Debug)]
pub(crate) struct Slots {
    device: Device,
    pub(super) count: usize,
    bytes: usize,
    /// Allocated at the first fetch.
    slots: Vec<Slot>,
    inward: Stream,
    /// Stage whose parameters point to its device buffer.
    current: Option<usize>,
    /// Number of fetches so far.
    fetched: u64,
}

#[derive(Debug)]
struct Slot {
    bytes: Tensor,
    /// Place of the stage that is in the buffer, or on its way there.
    holds: Option<usize>,
    /// Number of the fetch that filled it last.
    generation: u64,
    /// Event at which the weights have arrived; none if they have.
    arrived: Option<Event>,
    /// Event at which the last stage's work on the buffer is done.
    left: Option<Event>,
}

impl Slots {
    pub(super) fn new(device: Device, count: usize, bytes: usize) -> Result<Self> {
        let inward = Stream::new(device)?;
        Ok(Self { device, count, bytes, slots: Vec::new(), inward, current: None, fetched: 0 })
    }

    pub(super) fn is_current(&self, at: usize) -> bool {
        self.current == Some(at)
    }

    pub(super) fn has(&self, at: usize) -> bool {
        self.slots.iter().any(|slot| slot.holds == Some(at))
    }

    /// Returns the number of the fetch that brought the stage's weights, if they are on the device.
    pub(super) fn generation(&self, at: usize) -> Option<u64> {
        let slot = self.slots.iter().find(|slot| slot.holds == Some(at));
        slot.map(|slot| slot.generation)
    }

    /// Queues the copy of a stage's weights into a free buffer.
    pub(super) fn fetch(
        &mut self,
        at: usize,
        stage: &OffloadedStage,
        one: Move,
        clock: &mut MoveClock,
    ) -> Result<()> {
        self.make()?;
        let slot = self.slots.iter_mut().find(|slot| slot.holds.is_none());
        let slot = slot.expect("moves fetch into slots that were released");
        let inward = self.inward;
        if let Some(left) = slot.left.take() {
            inward.wait(&left)?;
        }
        let _inward = inward.enter()?;
        clock.moving(one, || stage.copy_to(&slot.bytes), |()| stage.fetched_bytes())?;
        slot.arrived = (self.device != Device::Cpu).then(|| Event::after(inward)).transpose()?;
        slot.holds = Some(at);
        self.fetched += 1;
        slot.generation = self.fetched;
        Ok(())
    }

    /// Allocates all buffers at once: a step whose buffers do not fit fails before it begins.
    fn make(&mut self) -> Result<()> {
        if self.slots.is_empty() {
            let bytes = |_| Tensor::f_empty([self.bytes as i64], (Kind::Uint8, self.device));
            let made: Vec<Tensor> =
                (0..self.count).map(bytes).collect::<std::result::Result<_, _>>()?;
            let slot =
                |bytes| Slot { bytes, holds: None, generation: 0, arrived: None, left: None };
            self.slots = made.into_iter().map(slot).collect();
            // The buffers come from the compute stream, which may have used their memory.
            let ready = Event::after(Stream::current(self.device)?)?;
            self.inward.wait(&ready)?;
        }
        Ok(())
    }

    /// Makes this thread's work on the device wait for the stage's weights, and points its parameters to
    /// the buffer.
    pub(super) fn enter(
        &mut self,
        at: usize,
        stage: &OffloadedStage,
        clock: &mut MoveClock,
    ) -> Result<()> {
        let slot = self.slots.iter_mut().find(|slot| slot.holds == Some(at));
        let slot = slot.expect("a stage is fetched before it is entered");
        if let Some(arrived) = slot.arrived.take() {
            let device = self.device;
            clock.waiting(Awaited::Weights, || Ok(Stream::current(device)?.wait(&arrived)?))?;
        }
        stage.point_to(&slot.bytes)?;
        self.current = Some(at);
        Ok(())
    }

    /// Points the stage's parameters to the host, and frees its buffer once its work is done.
    pub(super) fn release(&mut self, at: usize, stage: &OffloadedStage) -> Result<()> {
        let Some(slot) = self.slots.iter_mut().find(|slot| slot.holds == Some(at)) else {
            return Ok(());
        };
        stage.leave(&slot.bytes)?;
        if let Some(arrived) = slot.arrived.take() {
            // Fetched but unused: the next stage's work must come after this copy.
            Stream::current(self.device)?.wait(&arrived)?;
        }
        if self.device != Device::Cpu {
            slot.left = Some(Event::after(Stream::current(self.device)?)?);
        }
        slot.holds = None;
        self.current = self.current.filter(|current| *current != at);
        Ok(())
    }

    /// Releases every buffer.
    pub(super) fn leave_all(&mut self, stages: &[Option<OffloadedStage>]) -> Result<()> {
        let held: Vec<usize> = self.slots.iter().filter_map(|slot| slot.holds).collect();
        held.into_iter().try_for_each(|at| match &stages[at] {
            Some(stage) => self.release(at, stage),
            None => Ok(()),
        })
    }
}
