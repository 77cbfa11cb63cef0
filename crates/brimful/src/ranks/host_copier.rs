//! Copies gradients from their device to host memory, on a stream of its own.

use brimful_torch::stream::{Event, Stream};
use brimful_torch::transfer;
use tch::{Device, Kind, Tensor};

use crate::Result;

/// Copy stream of a device. On a CPU, copies are synchronous.
#[derive(Debug)]
pub(super) struct HostCopier {
    device: Device,
    stream: Stream,
}

impl HostCopier {
    pub(super) fn new(device: Device) -> Result<Self> {
        Ok(Self { device, stream: Stream::new(device)? })
    }

    /// Allocates host memory for this many elements, pinned if the device is not a CPU.
    pub(super) fn host_memory(&self, numbers: usize, kind: Kind) -> Result<Tensor> {
        let host_memory = Tensor::f_empty([numbers as i64], (kind, Device::Cpu))?;
        Ok(if self.device == Device::Cpu {
            host_memory
        } else {
            transfer::empty_pinned(&host_memory)?
        })
    }

    /// Copies a gradient that this thread's stream has computed.
    pub(super) fn bring(&self, gradient: &Tensor, into: &Tensor) -> Result<()> {
        let gradient = gradient.f_detach()?;
        if gradient.device() == Device::Cpu {
            return Ok(transfer::copy(into, &gradient)?);
        }
        // Copy stream and events belong to one device.
        let gradient = gradient.f_to_device(self.device)?;
        // The copy stream waits for the gradient. On the backward's stream, each copy would delay the backward.
        self.stream.wait(&Event::after(Stream::current(self.device)?)?)?;
        let _copying = self.stream.enter()?;
        transfer::copy(into, &gradient)?;
        // The gradient's memory must not be reused before it has been copied.
        Ok(self.stream.record_stream(&gradient)?)
    }

    /// Returns the event after the copies so far; `None` if they are complete.
    pub(super) fn completion(&self) -> Result<Option<Event>> {
        Ok(if self.device == Device::Cpu { None } else { Some(Event::after(self.stream)?) })
    }
}
