//! Tensors on their way from stage to stage, and when the sender's device has computed them.
//!
//! On one device, and between CPU devices, they are handed over as they are: nothing is copied, and
//! their memory stays charged to the arena that it came from. Else [`Copies`] brings them.

use std::sync::Arc;

use brimful_torch::stream::{Event, Stream};
use brimful_torch::transfer;
use tch::{Device, Tensor};

use crate::Result;
use crate::batch::copy_of;
use crate::copies::Copies;
use crate::memory::Arena;
/// Tensors under way; gradients come once for each group of loss terms.
pub(crate) use crate::world::Tensors;

/// The host's memory, as a place for parcels to wait in.
#[derive(Debug, Clone)]
pub(crate) struct RestingPlace {
    pub(crate) outward: Stream,
    /// What they are charged to there.
    arena: Option<Arena>,
}

impl RestingPlace {
    pub(crate) fn new(device: Device, arena: Option<Arena>) -> Result<Self> {
        Ok(Self { outward: Stream::new(device)?, arena })
    }
}

/// What travels between stages.
#[derive(Debug)]
pub(crate) struct StageParcel {
    tensors: Tensors,
    /// When they are what they are to be, on the sender's device or on the host; none where that is now, or
    /// where the receiver's work is behind the sender's anyway.
    ready: Option<Arc<Event>>,
    /// Whether they wait on the host, for a device that has no room for all that waits.
    rests: bool,
}

impl StageParcel {
    /// Tensors for this thread's own later work, or that have come from another rank.
    pub(crate) fn pack(tensors: Tensors) -> Self {
        Self { tensors, ready: None, rests: false }
    }

    /// Marks when this thread's work on `device` has made them, for another worker.
    pub(crate) fn marked(self, device: Device) -> Result<Self> {
        Ok(Self { ready: mark(device)?.map(Arc::new), ..self })
    }

    /// Lets what this thread's work on the device has made wait on the host.
    pub(crate) fn resting(self, host: &RestingPlace) -> Result<Self> {
        let Self { mut tensors, .. } = self;
        if let Some(computed) = mark(host.outward.device())? {
            host.outward.wait(&computed)?;
        }
        let _outward = host.outward.enter()?;
        for tensor in tensors.iter_mut().flatten().flatten() {
            let room = {
                let _charged = host.arena.as_ref().map(Arena::enter);
                // It comes back with its channels where they were: layers are slow where these change places.
                transfer::room_like(tensor)?
            };
            transfer::copy(&room, tensor)?;
            // Its memory must not be used for something else before it has been copied.
            host.outward.keep(tensor)?;
            *tensor = room.f_set_requires_grad(tensor.requires_grad())?;
        }
        let there = (host.outward.device() != Device::Cpu).then(|| Event::after(host.outward));
        Ok(Self { tensors, ready: there.transpose()?.map(Arc::new), rests: true })
    }

    pub(crate) fn rests(&self) -> bool {
        self.rests
    }

    /// The same parcel, to be unpacked once more.
    pub(crate) fn share(&self) -> Self {
        let share = |tensor: &Option<Tensor>| tensor.as_ref().map(Tensor::shallow_clone);
        Self {
            tensors: self.tensors.iter().map(|list| list.iter().map(share).collect()).collect(),
            ready: self.ready.clone(),
            rests: self.rests,
        }
    }

    /// The tensors in the host's memory, from where they go to another rank, and when they are
    /// there: the device copies them after its work so far, and nobody waits.
    pub(crate) fn on_host(self) -> Result<(Tensors, Option<Event>)> {
        // Without an event: this thread packed it, and the copy comes next in the same stream.
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

    pub(crate) fn values(values: Vec<Tensor>) -> Self {
        Self::pack(vec![values.into_iter().map(Some).collect()])
    }
}

impl Copies {
    /// The parcel's tensors on this device, for this thread's work on it.
    pub(crate) fn unpack(&self, parcel: StageParcel) -> Result<Tensors> {
        let StageParcel { mut tensors, ready, rests } = parcel;
        for tensor in tensors.iter_mut().flatten().flatten() {
            *tensor = match self.device() {
                // The host is the device too, but its memory is another account.
                Device::Cpu if rests => {
                    copy_of(&tensor.f_detach()?)?.f_set_requires_grad(tensor.requires_grad())?
                }
                // Workers of one device share its default stream, which keeps the order by itself.
                _ => self.finish(self.start(tensor, ready.as_deref())?)?,
            };
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
