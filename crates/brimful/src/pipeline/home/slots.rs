//! Memory on the device for stages that live on the host: filled in turn, used over and over.

use brimful_torch::stream::{Event, Stream};
use tch::{Device, Kind, Tensor};

use super::HostedStage;
use crate::Result;
use crate::pipeline::run::MoveClock;
use crate::schedule::{Awaited, Move};

/// A device's slots.
#[derive(Debug)]
pub(crate) struct Slots {
    device: Device,
    pub(super) count: usize,
    bytes: usize,
    /// Made when the first stage is fetched.
    slots: Vec<Slot>,
    inward: Stream,
    /// The stage whose parameters are what is in its slot.
    current: Option<usize>,
    /// How often a slot was filled.
    fetched: u64,
}

#[derive(Debug)]
struct Slot {
    bytes: Tensor,
    /// The place of the stage that is here, or on its way.
    holds: Option<usize>,
    /// Which of all fetches filled it last.
    generation: u64,
    /// When the weights are there; none where they are.
    arrived: Option<Event>,
    /// When the last stage's work on it is done.
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

    /// Which of all fetches the stage's weights came by, where they are here.
    pub(super) fn generation(&self, at: usize) -> Option<u64> {
        let slot = self.slots.iter().find(|slot| slot.holds == Some(at));
        slot.map(|slot| slot.generation)
    }

    /// Queues the copy of a stage's weights into a slot that holds none.
    pub(super) fn fetch(
        &mut self,
        at: usize,
        stage: &HostedStage,
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

    /// All slots, at once: a step whose slots do not fit fails before it has begun.
    fn make(&mut self) -> Result<()> {
        if self.slots.is_empty() {
            let bytes = |_| Tensor::f_empty([self.bytes as i64], (Kind::Uint8, self.device));
            let made: Vec<Tensor> =
                (0..self.count).map(bytes).collect::<std::result::Result<_, _>>()?;
            let slot =
                |bytes| Slot { bytes, holds: None, generation: 0, arrived: None, left: None };
            self.slots = made.into_iter().map(slot).collect();
            // Made on the compute stream: the memory may have been in use there.
            let ready = Event::after(Stream::current(self.device)?)?;
            self.inward.wait(&ready)?;
        }
        Ok(())
    }

    /// Lets this thread's work on the device come after the stage's weights, and the stage's
    /// parameters be what is there.
    pub(super) fn enter(
        &mut self,
        at: usize,
        stage: &HostedStage,
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

    /// Sends the stage's parameters home, and lets the next one have its slot when its work is done.
    pub(super) fn release(&mut self, at: usize, stage: &HostedStage) -> Result<()> {
        let Some(slot) = self.slots.iter_mut().find(|slot| slot.holds == Some(at)) else {
            return Ok(());
        };
        stage.leave(&slot.bytes)?;
        if let Some(arrived) = slot.arrived.take() {
            // Fetched and not used: whoever comes next must not be overtaken by it.
            Stream::current(self.device)?.wait(&arrived)?;
        }
        if self.device != Device::Cpu {
            slot.left = Some(Event::after(Stream::current(self.device)?)?);
        }
        slot.holds = None;
        self.current = self.current.filter(|current| *current != at);
        Ok(())
    }

    /// Releases every slot.
    pub(super) fn leave_all(&mut self, stages: &[Option<HostedStage>]) -> Result<()> {
        let held: Vec<usize> = self.slots.iter().filter_map(|slot| slot.holds).collect();
        held.into_iter().try_for_each(|at| match &stages[at] {
            Some(stage) => self.release(at, stage),
            None => Ok(()),
        })
    }
}
