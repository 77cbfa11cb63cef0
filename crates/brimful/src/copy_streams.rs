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

use crate::Result;
use crate::batch::{Borrowers, tensor_bytes};
use crate::stream_fence::accelerators;
use crate::timed_event::TimedEvent;

/// Copy streams of one thread to its device. Clones share the streams.
///
/// It lives as long as the engine or worker that copies, because memory belongs to the stream that allocated
/// it: memory of a new stream would stay with that stream after the copies.
#[derive(Debug, Clone)]
pub(crate) struct CopyStreams {
    device: Device,
    /// One stream for each device that was copied from or to.
    streams: Arc<Mutex<Vec<Stream>>>,
    /// True if pinned memory of the caller was read.
    reads_pinned: Arc<AtomicBool>,
    /// Borrowers of tensors that are on this device already, which are lent, not copied.
    pub(crate) borrowers: Borrowers,
}

/// A copy that has begun.
#[derive(Debug)]
pub(crate) struct Arriving {
    tensor: Tensor,
    /// Event of its completion; `None` where it is complete.
    done: Option<Event>,
}

impl Arriving {
    /// Bytes of the copy.
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

    pub(crate) fn device(&self) -> Device {
        self.device
    }

    /// Begins to copy a tensor that its own device has computed at `ready`; `None` if it was complete before
    /// any other work.
    pub(crate) fn begin(&self, tensor: &Tensor, ready: Option<&Event>) -> Result<Tensor> {
        let there = self.stream(tensor.device())?;
        let here = self.stream(self.device)?;
        // Enters both: libtorch orders a copy between devices by the current streams of both.
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

    /// Records the completion of all copies so far; `None` where they are complete.
    pub(crate) fn completion(&self) -> Result<Option<Event>> {
        if self.device == Device::Cpu {
            return Ok(None);
        }
        Ok(Some(Event::after(self.stream(self.device)?)?))
    }

    /// Returns the event at which a copy of a tensor that is complete at `ready` could begin: after all earlier
    /// copies.
    pub(crate) fn event_after(&self, ready: Option<&Event>) -> Result<TimedEvent> {
        if let (Some(ready), true) = (ready, self.device != Device::Cpu) {
            self.stream(self.device)?.wait(ready)?;
        }
        match self.completion()? {
            Some(completed) => Ok(TimedEvent::Stream(completed)),
            None => TimedEvent::now(self.device),
        }
    }

    /// Makes this thread's later work on these tensors wait for the copies that have begun: on their own
    /// accelerator, or on the host, which waits if it could otherwise overwrite pinned memory that is still
    /// being read.
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

    /// Returns the copy, for this thread's later work on the device.
    pub(crate) fn finish(&self, arriving: Arriving) -> Result<Tensor> {
        let Arriving { tensor, done } = arriving;
        if let Some(done) = done {
            let compute = Stream::current(self.device)?;
            compute.wait(&done)?;
            // It belongs to the copy stream: if freed, it would be reused there before this work has read it.
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
