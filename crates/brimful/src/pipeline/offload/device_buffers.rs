//! Device buffers for offloaded stages, filled in turn and reused.

use brimful_torch::stream::{Event, Stream};
use tch::{Device, Kind, Tensor};

use super::OffloadedStage;
use crate::Result;
use crate::pipeline::run::TransferClock;
use brimful_plan::schedule::{Awaited, Transfer};

/// Device buffers of a worker.
#[derive(Debug)]
pub(crate) struct DeviceBuffers {
    device: Device,
    pub(super) count: usize,
    bytes: usize,
    /// Allocated at the first fetch.
    buffers: Vec<DeviceBuffer>,
    inward: Stream,
    /// Stage whose parameters point to its device buffer.
    current: Option<usize>,
    /// Number of fetches so far.
    fetched: u64,
}

#[derive(Debug)]
struct DeviceBuffer {
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

impl DeviceBuffers {
    pub(super) fn new(device: Device, count: usize, bytes: usize) -> Result<Self> {
        let inward = Stream::new(device)?;
        Ok(Self { device, count, bytes, buffers: Vec::new(), inward, current: None, fetched: 0 })
    }

    pub(super) fn is_current(&self, at: usize) -> bool {
        self.current == Some(at)
    }

    pub(super) fn has(&self, at: usize) -> bool {
        self.buffers.iter().any(|buffer| buffer.holds == Some(at))
    }

    /// Returns the number of the fetch that brought the stage's weights, if they are on the device.
    pub(super) fn generation(&self, at: usize) -> Option<u64> {
        let buffer = self.buffers.iter().find(|buffer| buffer.holds == Some(at));
        buffer.map(|buffer| buffer.generation)
    }

    /// Queues the copy of a stage's weights into a free buffer.
    pub(super) fn fetch(
        &mut self,
        at: usize,
        stage: &OffloadedStage,
        one: Transfer,
        clock: &mut TransferClock,
    ) -> Result<()> {
        self.make()?;
        let buffer = self.buffers.iter_mut().find(|buffer| buffer.holds.is_none());
        let buffer = buffer.expect("moves fetch into buffers that were released");
        let inward = self.inward;
        if let Some(left) = buffer.left.take() {
            inward.wait(&left)?;
        }
        let _inward = inward.enter()?;
        clock.transfer(one, || stage.copy_to(&buffer.bytes), |()| stage.fetched_bytes())?;
        buffer.arrived = (self.device != Device::Cpu).then(|| Event::after(inward)).transpose()?;
        buffer.holds = Some(at);
        self.fetched += 1;
        buffer.generation = self.fetched;
        Ok(())
    }

    /// Allocates all buffers at once: a step whose buffers do not fit fails before it begins.
    fn make(&mut self) -> Result<()> {
        if self.buffers.is_empty() {
            let bytes = |_| Tensor::f_empty([self.bytes as i64], (Kind::Uint8, self.device));
            let made: Vec<Tensor> =
                (0..self.count).map(bytes).collect::<std::result::Result<_, _>>()?;
            let buffer = |bytes| DeviceBuffer {
                bytes,
                holds: None,
                generation: 0,
                arrived: None,
                left: None,
            };
            self.buffers = made.into_iter().map(buffer).collect();
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
        clock: &mut TransferClock,
    ) -> Result<()> {
        let buffer = self.buffers.iter_mut().find(|buffer| buffer.holds == Some(at));
        let buffer = buffer.expect("a stage is fetched before it is entered");
        if let Some(arrived) = buffer.arrived.take() {
            let device = self.device;
            clock.waiting(Awaited::Weights, || Ok(Stream::current(device)?.wait(&arrived)?))?;
        }
        stage.point_to(&buffer.bytes)?;
        self.current = Some(at);
        Ok(())
    }

    /// Points the stage's parameters to the host, and frees its buffer once its work is done.
    pub(super) fn release(&mut self, at: usize, stage: &OffloadedStage) -> Result<()> {
        let Some(buffer) = self.buffers.iter_mut().find(|buffer| buffer.holds == Some(at)) else {
            return Ok(());
        };
        stage.leave(&buffer.bytes)?;
        if let Some(arrived) = buffer.arrived.take() {
            // Fetched but unused: the next stage's work must come after this copy.
            Stream::current(self.device)?.wait(&arrived)?;
        }
        if self.device != Device::Cpu {
            buffer.left = Some(Event::after(Stream::current(self.device)?)?);
        }
        buffer.holds = None;
        self.current = self.current.filter(|current| *current != at);
        Ok(())
    }

    /// Releases every buffer.
    pub(super) fn leave_all(&mut self, stages: &[Option<OffloadedStage>]) -> Result<()> {
        let held: Vec<usize> = self.buffers.iter().filter_map(|buffer| buffer.holds).collect();
        held.into_iter().try_for_each(|at| match &stages[at] {
            Some(stage) => self.release(at, stage),
            None => Ok(()),
        })
    }
}
