//! Copies to a device on copy streams, concurrent with the compute of all devices.
//!
//! ```text
//!   source      compute … │ event                      the tensor is complete here
//!   copies                  └─ wait │ copy │ event     copy streams, on both devices
//!   device      compute …                  └─ wait │ compute with it …
//! ```
//!
//! No host thread waits, unless the device is the host.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use brimful_torch::stream::{Event, Stream};
use brimful_torch::transfer;
use tch::{Device, Tensor};

use super::TimedEvent;
use super::fence::accelerators;
use crate::Result;
use crate::batch::{Borrowers, tensor_bytes};

/// Copy streams of one thread to its device. Clones share the streams.
///
/// They live as long as the engine or worker that copies, because libtorch's cache keeps memory for the stream
/// that allocated it. The memory of a short-lived stream would stay unused in the cache.
#[derive(Debug, Clone)]
pub(crate) struct CopyStreams {
    pub(crate) device: Device,
    /// One stream for each device that was copied from or to.
    streams: Arc<Mutex<Vec<Stream>>>,
    /// True if pinned memory of the caller was read.
    reads_pinned: Arc<AtomicBool>,
    /// Borrowers of tensors that are on this device already: such tensors are lent, not copied.
    pub(crate) borrowers: Borrowers,
}

/// A copy that has begun.
#[derive(Debug)]
pub(crate) struct Arriving {
    tensor: Tensor,
    /// Event at which the copy is complete; `None` if it is complete already.
    done: Option<Event>,
}

impl Arriving {
    /// Returns the bytes of the copy.
    pub(crate) fn bytes(&self) -> u64 {
        tensor_bytes(&self.tensor)
    }
}

impl CopyStreams {
    pub(crate) fn new(device: Device) -> Self {
        Self {
            device,
            streams: Arc::default(),
            reads_pinned: Arc::default(),
            borrowers: Borrowers::default(),
        }
    }

    /// Begins to copy a tensor to this device. The copy waits for `ready`, at which the tensor is complete on its
    /// own device; without `ready`, the tensor is complete already.
    pub(crate) fn begin(&self, tensor: &Tensor, ready: Option<&Event>) -> Result<Tensor> {
        let there = self.stream(tensor.device())?;
        let here = self.stream(self.device)?;
        // Enters both streams, because libtorch orders a copy between two devices by the current stream of each.
        let _copying = (there.enter()?, here.enter()?);
        if let Some(ready) = ready {
            there.wait(ready)?;
            here.wait(ready)?;
        }
        let source = transfer::pin(tensor)?;
        if source.device() == Device::Cpu && source.data_ptr() == tensor.data_ptr() {
            self.reads_pinned.store(true, Ordering::Relaxed);
        }
        let copy = transfer::send(&source, self.device)?;
        // The source's memory must not be reused before the copy is done.
        if source.device() != Device::Cpu {
            there.record_stream(&source)?;
        }
        if self.device == Device::Cpu {
            // The host is the device, so it has to wait.
            there.synchronize()?;
        }
        Ok(copy)
    }

    /// Records an event at which all copies so far are complete; `None` on a CPU, where they are complete now.
    pub(crate) fn completion(&self) -> Result<Option<Event>> {
        if self.device == Device::Cpu {
            return Ok(None);
        }
        Ok(Some(Event::after(self.stream(self.device)?)?))
    }

    /// Returns the event at which the next copy could begin: after all earlier copies, and after `ready`, at which
    /// its tensor is complete.
    pub(crate) fn event_after(&self, ready: Option<&Event>) -> Result<TimedEvent> {
        if let (Some(ready), true) = (ready, self.device != Device::Cpu) {
            self.stream(self.device)?.wait(ready)?;
        }
        match self.completion()? {
            Some(completed) => Ok(TimedEvent::Stream(completed)),
            None => TimedEvent::now(self.device),
        }
    }

    /// Makes this thread's later work on these tensors wait for the copies that have begun. Their accelerators'
    /// streams wait. The host waits only if copies read the caller's pinned memory, which it could overwrite.
    pub(crate) fn release<'a>(&self, tensors: impl Iterator<Item = &'a Tensor>) -> Result<()> {
        let Some(completed) = self.completion()? else { return Ok(()) };
        for source in accelerators(tensors.map(Tensor::device)) {
            Stream::current(source)?.wait(&completed)?;
        }
        if self.reads_pinned.swap(false, Ordering::Relaxed) {
            completed.synchronize()?;
        }
        Ok(())
    }

    /// Begins to copy a tensor to this device; the copy requires a gradient if the tensor does. A tensor on
    /// this device is not copied.
    pub(crate) fn start(&self, tensor: &Tensor, ready: Option<&Event>) -> Result<Arriving> {
        if tensor.device() == self.device {
            return Ok(Arriving { tensor: tensor.shallow_clone(), done: None });
        }
        let copy = self.begin(&tensor.f_detach()?, ready)?;
        let copy = copy.f_set_requires_grad(tensor.requires_grad())?;
        Ok(Arriving { tensor: copy, done: self.completion()? })
    }

    /// Returns the copy. This thread's later work on the device waits for it.
    pub(crate) fn finish(&self, arriving: Arriving) -> Result<Tensor> {
        let Arriving { tensor, done } = arriving;
        if let Some(done) = done {
            let compute = Stream::current(self.device)?;
            compute.wait(&done)?;
            // The memory belongs to the copy stream, which could reuse freed memory before this work has read it.
            compute.record_stream(&tensor)?;
        }
        Ok(tensor)
    }

    fn stream(&self, device: Device) -> Result<Stream> {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(stream) = streams.iter().find(|stream| stream.device() == device) {
            return Ok(*stream);
        }
        let stream = Stream::new(device)?;
        streams.push(stream);
        Ok(stream)
    }
}
