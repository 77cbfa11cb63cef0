//! Device buffers for offloaded stages, filled in turn and reused.

use std::sync::Arc;

use brimful_torch::stream::{Event, Stream};
use tch::{Device, Kind, Tensor};

use crate::{Error, Result};

/// Device buffers of one size, and the stream that fills them.
#[derive(Debug)]
pub(crate) struct DeviceBuffers {
    device: Device,
    pub(super) count: usize,
    pub(super) bytes: usize,
    /// Buffers; for weights allocated at the first fetch, for optimizer state when a step with updates begins.
    buffers: Vec<DeviceBuffer>,
    inward: Stream,
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
    /// Event at which the contents have arrived; none once the compute stream waits for the event.
    arrived: Option<Event>,
    /// Events at which work on the buffer's previous contents is done.
    left: Vec<Arc<Event>>,
}

impl DeviceBuffers {
    pub(super) fn new(device: Device, count: usize, bytes: usize) -> Result<Self> {
        let inward = Stream::new(device)?;
        Ok(Self { device, count, bytes, buffers: Vec::new(), inward, fetched: 0 })
    }

    pub(super) fn has(&self, at: usize) -> bool {
        self.buffers.iter().any(|buffer| buffer.holds == Some(at))
    }

    /// Returns the number of the fetch that brought the stage, if it is on the device.
    pub(super) fn generation(&self, at: usize) -> Option<u64> {
        let buffer = self.buffers.iter().find(|buffer| buffer.holds == Some(at));
        buffer.map(|buffer| buffer.generation)
    }

    /// Returns the places of the stages that are in buffers.
    pub(super) fn held(&self) -> Vec<usize> {
        self.buffers.iter().filter_map(|buffer| buffer.holds).collect()
    }

    /// Fetches a stage into a free buffer: `copy` queues the copies on the stream that it is given.
    pub(super) fn fill(
        &mut self,
        at: usize,
        copy: impl FnOnce(Stream, &Tensor) -> Result<()>,
    ) -> Result<()> {
        self.allocate(self.count)?;
        let buffer = self.buffers.iter_mut().find(|buffer| buffer.holds.is_none());
        let buffer = buffer.expect("transfers fetch into buffers that were released");
        let inward = self.inward;
        for left in buffer.left.drain(..) {
            inward.wait(&left)?;
        }
        let _inward = inward.enter()?;
        copy(inward, &buffer.bytes)?;
        buffer.arrived = Some(Event::after(inward)?);
        buffer.holds = Some(at);
        self.fetched += 1;
        buffer.generation = self.fetched;
        Ok(())
    }

    /// Copies more into the stage's buffer: `copy` queues the copies on the stream that fills it.
    pub(super) fn add(
        &mut self,
        at: usize,
        copy: impl FnOnce(&Tensor) -> Result<()>,
    ) -> Result<()> {
        let buffer = self.buffers.iter_mut().find(|buffer| buffer.holds == Some(at));
        let buffer = buffer.expect("only a stage in a buffer is added to");
        let _inward = self.inward.enter()?;
        copy(&buffer.bytes)?;
        buffer.arrived = Some(Event::after(self.inward)?);
        Ok(())
    }

    /// Returns whether a buffer is free, or can be made.
    pub(super) fn is_free(&self) -> bool {
        self.buffers.is_empty() || self.buffers.iter().any(|buffer| buffer.holds.is_none())
    }

    /// Returns whether a buffer can be filled ahead of its use, while another one is in use.
    pub(super) fn can_fill_ahead(&self) -> bool {
        self.buffers.len() > 1 && self.is_free()
    }

    /// Makes the buffers at least this large; none may be in use. If the device has too little memory for
    /// all, makes a single one.
    ///
    /// # Errors
    /// When the device's memory runs out; the smaller buffers are then freed.
    pub(super) fn reserve(&mut self, bytes: usize) -> Result<()> {
        if bytes > self.bytes {
            for left in self.buffers.drain(..).flat_map(|buffer| buffer.left) {
                left.synchronize()?;
            }
            self.bytes = bytes;
        }
        match self.allocate(self.count) {
            Err(Error::OutOfMemory(_)) => self.allocate(1),
            made => made,
        }
    }

    /// Allocates this many buffers together, unless there are buffers already. So a step whose buffers do not fit
    /// fails before it begins.
    fn allocate(&mut self, count: usize) -> Result<()> {
        if self.buffers.is_empty() {
            let bytes = |_| Tensor::f_empty([self.bytes as i64], (Kind::Uint8, self.device));
            let made: Vec<Tensor> = (0..count).map(bytes).collect::<std::result::Result<_, _>>()?;
            let buffer = |bytes| DeviceBuffer {
                bytes,
                holds: None,
                generation: 0,
                arrived: None,
                left: Vec::new(),
            };
            self.buffers = made.into_iter().map(buffer).collect();
            // The allocator may return memory that queued work of the compute stream still uses.
            let ready = Event::after(Stream::current(self.device)?)?;
            self.inward.wait(&ready)?;
        }
        Ok(())
    }

    /// Makes this thread's work on the device wait until the stage's buffer is filled, and returns the buffer.
    pub(super) fn wait(&mut self, at: usize) -> Result<Tensor> {
        let buffer = self.buffers.iter_mut().find(|buffer| buffer.holds == Some(at));
        let buffer = buffer.expect("a stage is fetched before it is used");
        if let Some(arrived) = buffer.arrived.take() {
            Stream::current(self.device)?.wait(&arrived)?;
        }
        Ok(buffer.bytes.shallow_clone())
    }

    /// Waits until all queued copies into the buffers are done.
    pub(super) fn synchronize(&self) -> Result<()> {
        Ok(self.inward.synchronize()?)
    }

    /// Returns the stage's buffer.
    pub(super) fn of(&self, at: usize) -> Option<&Tensor> {
        let buffer = self.buffers.iter().find(|buffer| buffer.holds == Some(at));
        buffer.map(|buffer| &buffer.bytes)
    }

    /// Frees the stage's buffer, once this thread's work so far and `other` are done.
    pub(super) fn release(&mut self, at: usize, other: Option<Arc<Event>>) -> Result<()> {
        let device = self.device;
        let Some(buffer) = self.buffers.iter_mut().find(|buffer| buffer.holds == Some(at)) else {
            return Ok(());
        };
        buffer.holds = None;
        if let Some(arrived) = buffer.arrived.take() {
            // Fetched but unused: the next stage's work must come after this copy.
            Stream::current(device)?.wait(&arrived)?;
        }
        buffer.left.push(Arc::new(Event::after(Stream::current(device)?)?));
        buffer.left.extend(other);
        Ok(())
    }
}
