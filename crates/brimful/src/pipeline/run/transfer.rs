//! Tensors on their way from stage to stage, and when the sender's device has computed them.
//!
//! On one device, and between CPU devices, they are handed over as they are: nothing is copied, and
//! their memory stays charged to the arena that it came from. Else [`Copies`] brings them.

use brimful_torch::stream::{Event, Stream};
use brimful_torch::transfer;
use tch::{Device, Tensor};

use crate::Result;
use crate::copies::Copies;
/// Tensors under way; gradients come once for each group of loss terms.
pub(crate) use crate::world::Tensors;

/// What travels between stages.
#[derive(Debug)]
pub(crate) struct StageParcel {
    tensors: Tensors,
    /// When the sender's device has computed them; none on a CPU, where that is now.
    ready: Option<Event>,
}

impl StageParcel {
    /// Packs tensors that this thread's work on `device` has made.
    pub(crate) fn pack(tensors: Tensors, device: Device) -> Result<Self> {
        Ok(Self { tensors, ready: mark(device)? })
    }

    /// Tensors that have come from another rank.
    pub(crate) fn arrived(tensors: Tensors) -> Self {
        Self { tensors, ready: None }
    }

    /// The tensors in the host's memory, from where they go to another rank, and when they are
    /// there: the device copies them after its work so far, and nobody waits.
    pub(crate) fn on_host(self) -> Result<(Tensors, Option<Event>)> {
        // Without its event: this thread packed it, and the copy comes next in the same stream.
        let Self { mut tensors, .. } = self;
        let mut sender = Device::Cpu;
        for tensor in tensors.iter_mut().flatten().flatten() {
            if tensor.device() != Device::Cpu {
                sender = tensor.device();
                // Page-locked, or the copy would make this thread wait for all of the device's work.
                let host = transfer::room_for(tensor)?;
                transfer::copy(&host, tensor)?;
                *tensor = host.f_set_requires_grad(tensor.requires_grad())?;
            }
        }
        Ok((tensors, mark(sender)?))
    }

    pub(crate) fn values(values: Vec<Tensor>, device: Device) -> Result<Self> {
        Self::pack(vec![values.into_iter().map(Some).collect()], device)
    }
}

impl Copies {
    /// The parcel's tensors on this device, for this thread's work on it.
    pub(crate) fn unpack(&self, parcel: StageParcel) -> Result<Tensors> {
        let StageParcel { mut tensors, ready } = parcel;
        for tensor in tensors.iter_mut().flatten().flatten() {
            // Workers of one device share its default stream, which keeps the order by itself.
            *tensor = self.finish(self.start(tensor, ready.as_ref())?)?;
        }
        Ok(tensors)
    }

    /// The values of a parcel in which none is missing.
    pub(crate) fn unpack_values(&self, parcel: StageParcel) -> Result<Vec<Tensor>> {
        Ok(self.unpack(parcel)?.into_iter().flatten().flatten().collect())
    }
}

fn mark(device: Device) -> Result<Option<Event>> {
    if device == Device::Cpu {
        return Ok(None);
    }
    Ok(Some(Event::after(Stream::current(device)?)?))
}
