//! Copies to a device on streams of their own, beside the work of all devices.
//!
//! ```text
//!   source      compute … │ event                      the numbers are there from here on
//!   copies                  └─ wait │ copy │ event     streams of their own, on both devices
//!   device      compute …                  └─ wait │ compute with them …
//! ```
//!
//! Nobody's host thread waits, but where the device is the host.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use brimful_torch::stream::{Event, Stream};
use brimful_torch::transfer;
use tch::{Device, Tensor};

use crate::Result;
use crate::batch::{Borrowers, tensor_bytes};
use crate::moment::Moment;
use crate::queued::accelerators;

/// One thread's copies to its device. Clones use the same streams.
///
/// It lives as long as whoever needs copies, because memory belongs to the stream that it was made on:
/// what a new stream has used would stay with that stream when all is over.
#[derive(Debug, Clone)]
pub(crate) struct Copies {
    device: Device,
    /// One for each device that was copied from or to.
    streams: Arc<Mutex<Vec<Stream>>>,
    /// Whether page-locked memory of somebody else's was read.
    reads_page_locked: Arc<AtomicBool>,
    /// Of what is here already, and is not copied but lent.
    pub(crate) borrowers: Borrowers,
}

/// A copy that has been begun.
#[derive(Debug)]
pub(crate) struct Arriving {
    tensor: Tensor,
    /// When it is there; none where it is.
    done: Option<Event>,
}

impl Arriving {
    /// What crosses.
    pub(crate) fn bytes(&self) -> u64 {
        tensor_bytes(&self.tensor)
    }
}

impl Copies {
    pub(crate) fn new(device: Device) -> Self {
        Self {
            device,
            streams: Arc::default(),
            reads_page_locked: Arc::default(),
            borrowers: Borrowers::default(),
        }
    }

    pub(crate) fn device(&self) -> Device {
        self.device
    }

    /// Begins to copy a tensor that its own device has computed at `ready`, or has been there before
    /// any other work.
    pub(crate) fn begin(&self, tensor: &Tensor, ready: Option<&Event>) -> Result<Tensor> {
        let there = self.stream(tensor.device())?;
        let here = self.stream(self.device)?;
        // Both entered: libtorch orders a copy between devices by the current streams of both.
        let _copying = (there.enter()?, here.enter()?);
        if let Some(ready) = ready {
            there.wait(ready)?;
            here.wait(ready)?;
        }
        let source = transfer::pin(tensor)?;
        if source.device() == Device::Cpu && source.data_ptr() == tensor.data_ptr() {
            self.reads_page_locked.store(true, Ordering::Relaxed);
        }
        let copy = transfer::send(&source, self.device)?;
        // The source's memory must not be used for something else before it has been copied.
        if source.device() != Device::Cpu {
            there.keep(&source)?;
        }
        if self.device == Device::Cpu {
            // The host is the device, and cannot but wait.
            there.synchronize()?;
        }
        Ok(copy)
    }

    /// When all copies that were begun so far are there; none where they are.
    pub(crate) fn landing(&self) -> Result<Option<Event>> {
        if self.device == Device::Cpu {
            return Ok(None);
        }
        Ok(Some(Event::after(self.stream(self.device)?)?))
    }

    /// When a copy of what is there at `ready` can begin, if nothing else is begun: after those before it.
    pub(crate) fn moment_after(&self, ready: Option<&Event>) -> Result<Moment> {
        if let (Some(ready), true) = (ready, self.device != Device::Cpu) {
            self.stream(self.device)?.wait(ready)?;
        }
        match self.landing()? {
            Some(landed) => Ok(Moment::Queued(landed)),
            None => Moment::now(self.device),
        }
    }

    /// Lets what this thread does to these tensors from now on come after the copies of them that were
    /// begun: on their own accelerator, or by the host, which must wait where it could write at once to
    /// page-locked memory that is still being read.
    pub(crate) fn release<'a>(&self, tensors: impl Iterator<Item = &'a Tensor>) -> Result<()> {
        let Some(landed) = self.landing()? else { return Ok(()) };
        for source in accelerators(tensors.map(Tensor::device)) {
            Stream::current(source)?.wait(&landed)?;
        }
        if self.reads_page_locked.swap(false, Ordering::Relaxed) {
            landed.synchronize()?;
        }
        Ok(())
    }

    /// Begins to copy a tensor to this device, with a gradient of its own where it has one; one that is
    /// here stays as it is.
    pub(crate) fn start(&self, tensor: &Tensor, ready: Option<&Event>) -> Result<Arriving> {
        if tensor.device() == self.device {
            return Ok(Arriving { tensor: tensor.shallow_clone(), done: None });
        }
        let copy = self.begin(&tensor.f_detach()?, ready)?;
        let copy = copy.f_set_requires_grad(tensor.requires_grad())?;
        Ok(Arriving { tensor: copy, done: self.landing()? })
    }

    /// The copy, for this thread's work on the device from now on.
    pub(crate) fn finish(&self, arriving: Arriving) -> Result<Tensor> {
        let Arriving { tensor, done } = arriving;
        if let Some(done) = done {
            let compute = Stream::current(self.device)?;
            compute.wait(&done)?;
            // It belongs to the stream of copies: freed, it would be used there before this has read it.
            compute.keep(&tensor)?;
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
