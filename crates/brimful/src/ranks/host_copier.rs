//! The way of gradients from their device to the host's memory, beside the device's other work.

use brimful_torch::stream::{Event, Stream};
use brimful_torch::transfer;
use tch::{Device, Kind, Tensor};

use crate::Result;

/// A device's own copies. On a CPU, where the host's memory is the device's, they are done at once.
#[derive(Debug)]
pub(super) struct HostCopier {
    device: Device,
    copies: Stream,
}

impl HostCopier {
    pub(super) fn new(device: Device) -> Result<Self> {
        Ok(Self { device, copies: Stream::new(device)? })
    }

    /// Room in the host's memory for so many numbers.
    pub(super) fn room(&self, numbers: usize, kind: Kind) -> Result<Tensor> {
        let room = Tensor::f_empty([numbers as i64], (kind, Device::Cpu))?;
        Ok(if self.device == Device::Cpu { room } else { transfer::room_for(&room)? })
    }

    /// Copies a gradient that this thread's stream has computed.
    pub(super) fn bring(&self, gradient: &Tensor, into: &Tensor) -> Result<()> {
        let gradient = gradient.f_detach()?;
        if gradient.device() == Device::Cpu {
            return Ok(transfer::copy(into, &gradient)?);
        }
        // Its copies and their events are of one device.
        let gradient = gradient.f_to_device(self.device)?;
        // On a stream of its own, after the gradient: on the backward's, each copy would delay it.
        self.copies.wait(&Event::after(Stream::current(self.device)?)?)?;
        let _copying = self.copies.enter()?;
        transfer::copy(into, &gradient)?;
        // Its memory must not be used for something else before it has been copied.
        Ok(self.copies.keep(&gradient)?)
    }

    /// When what was brought so far is there; none where it is.
    pub(super) fn landing(&self) -> Result<Option<Event>> {
        Ok(if self.device == Device::Cpu { None } else { Some(Event::after(self.copies)?) })
    }
}
