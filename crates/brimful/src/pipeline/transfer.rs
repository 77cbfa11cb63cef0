//! Brings tensors from one device to another while both go on computing.
//!
//! ```text
//!   sender      compute … │ event                      the tensors are there from here on
//!   copies                  └─ wait │ copy │ event     streams of their own, on both devices
//!   receiver    compute …                  └─ wait │ compute with them …
//! ```
//!
//! Nobody's host thread waits. On one device, and between CPU devices, tensors are handed over as
//! they are: nothing is copied, and their memory stays charged to the arena that it came from.

use brimful_torch::stream::{Event, Stream};
use brimful_torch::transfer;
use tch::{Device, Tensor};

use crate::Result;
/// Tensors under way; gradients come once for each group of loss terms.
pub(super) use crate::world::Tensors;

/// What travels between stages.
#[derive(Debug)]
pub(super) struct Parcel {
    tensors: Tensors,
    /// When the sender's device has computed them; none on a CPU, where that is now.
    ready: Option<Event>,
}

impl Parcel {
    /// Packs tensors that this thread's work on `device` has made.
    pub(super) fn pack(tensors: Tensors, device: Device) -> Result<Self> {
        Ok(Self { tensors, ready: mark(device)? })
    }

    /// Tensors that have come from another rank.
    pub(super) fn arrived(tensors: Tensors) -> Self {
        Self { tensors, ready: None }
    }

    /// The tensors in the host's memory, from where they go to another rank, and when they are
    /// there: the device copies them after its work so far, and nobody waits.
    pub(super) fn on_host(self) -> Result<(Tensors, Option<Event>)> {
        let Self { mut tensors, .. } = self;
        let mut sender = Device::Cpu;
        for tensor in tensors.iter_mut().flatten().flatten() {
            if tensor.device() != Device::Cpu {
                sender = tensor.device();
                let host = transfer::room_for(tensor)?;
                transfer::copy(&host, tensor)?;
                *tensor = host.f_set_requires_grad(tensor.requires_grad())?;
            }
        }
        Ok((tensors, mark(sender)?))
    }

    pub(super) fn values(values: Vec<Tensor>, device: Device) -> Result<Self> {
        Self::pack(vec![values.into_iter().map(Some).collect()], device)
    }
}

/// A copy that has been begun.
#[derive(Debug)]
pub(super) struct Arriving {
    tensor: Tensor,
    /// When it is there; none where it is.
    done: Option<Event>,
}

/// A worker's end of all transfers.
#[derive(Debug)]
pub(super) struct Dock {
    device: Device,
    /// The streams that copies use, one a device.
    streams: Vec<Stream>,
}

impl Dock {
    pub(super) fn new(device: Device) -> Self {
        Self { device, streams: Vec::new() }
    }

    /// The parcel's tensors on this device, for this thread's work on it.
    pub(super) fn unpack(&mut self, parcel: Parcel) -> Result<Tensors> {
        let Parcel { mut tensors, ready } = parcel;
        for tensor in tensors.iter_mut().flatten().flatten() {
            // Workers of one device share its default stream, which keeps the order by itself.
            if tensor.device() != self.device {
                let arriving = self.copy(tensor, ready.as_ref())?;
                *tensor = self.arrive(arriving)?;
            }
        }
        Ok(tensors)
    }

    /// The values of a parcel in which none is missing.
    pub(super) fn unpack_values(&mut self, parcel: Parcel) -> Result<Vec<Tensor>> {
        Ok(self.unpack(parcel)?.into_iter().flatten().flatten().collect())
    }

    /// Lets copies to this device begin, long before they are needed.
    pub(super) fn start(&mut self, values: Vec<Tensor>) -> Result<Vec<Arriving>> {
        let start = |tensor: Tensor| match tensor.device() == self.device {
            true => Ok(Arriving { tensor, done: None }),
            false => self.copy(&tensor, None),
        };
        values.into_iter().map(start).collect()
    }

    /// The copies that have been begun, for this thread's work on the device.
    pub(super) fn finish(&self, arriving: Vec<Arriving>) -> Result<Vec<Tensor>> {
        arriving.into_iter().map(|arriving| self.arrive(arriving)).collect()
    }

    fn copy(&mut self, tensor: &Tensor, ready: Option<&Event>) -> Result<Arriving> {
        let (there, here) = (self.stream(tensor.device())?, self.stream(self.device)?);
        let _copying = (there.enter()?, here.enter()?);
        if let Some(ready) = ready {
            there.wait(ready)?;
            here.wait(ready)?;
        }
        let tensor = copied(tensor, there, self.device)?;
        if self.device == Device::Cpu {
            // The host is the device, and cannot but wait.
            there.synchronize()?;
            return Ok(Arriving { tensor, done: None });
        }
        Ok(Arriving { tensor, done: Some(Event::after(here)?) })
    }

    /// Lets this device's work from now on wait for the copy.
    fn arrive(&self, arriving: Arriving) -> Result<Tensor> {
        let Arriving { tensor, done } = arriving;
        if let Some(done) = done {
            let compute = Stream::current(self.device)?;
            compute.wait(&done)?;
            compute.keep(&tensor)?;
        }
        Ok(tensor)
    }

    fn stream(&mut self, device: Device) -> Result<Stream> {
        if let Some(stream) = self.streams.iter().find(|stream| stream.device() == device) {
            return Ok(*stream);
        }
        let stream = Stream::new(device)?;
        self.streams.push(stream);
        Ok(stream)
    }
}

/// A copy on the device, with a gradient of its own where the tensor has one.
fn copied(tensor: &Tensor, there: Stream, device: Device) -> Result<Tensor> {
    let source = transfer::pin(&tensor.f_detach()?)?;
    let copy = transfer::send(&source, device)?;
    // The source's memory must not be used for something else before it has been copied.
    if source.device() != Device::Cpu {
        there.keep(&source)?;
    }
    Ok(copy.f_set_requires_grad(tensor.requires_grad())?)
}

fn mark(device: Device) -> Result<Option<Event>> {
    if device == Device::Cpu {
        return Ok(None);
    }
    Ok(Some(Event::after(Stream::current(device)?)?))
}
