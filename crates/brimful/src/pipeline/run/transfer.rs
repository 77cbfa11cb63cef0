//! Tensors on their way from stage to stage, and when the sender's device has computed them.
//!
//! On one device, and between CPU devices, they are handed over as they are: nothing is copied, and
//! their memory stays charged to the arena that it came from. Else [`Copies`] brings them.

use std::sync::Arc;

use brimful_torch::stream::{Event, Stream};
use brimful_torch::transfer;
use tch::{Device, Tensor};

use super::move_clock::MoveClock;
use crate::Result;
use crate::batch::{copy_of, tensor_bytes};
use crate::copies::{Arriving, Copies};
use crate::memory::Arena;
use crate::schedule::{Awaited, Move};
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

    /// Queues a copy to the host, on the stream outward, which this thread has entered.
    fn take(&self, tensor: &Tensor) -> Result<Tensor> {
        let room = {
            let _charged = self.arena.as_ref().map(Arena::enter);
            // It comes back with its channels where they were: layers are slow where these change places.
            transfer::room_like(tensor)?
        };
        transfer::copy(&room, tensor)?;
        // Its memory must not be used for something else before it has been copied.
        self.outward.keep(tensor)?;
        Ok(room.f_set_requires_grad(tensor.requires_grad())?)
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
    pub(crate) rests: bool,
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

    /// Lets what this thread's work on the device has made wait on the host, where this move brings it.
    pub(crate) fn resting(
        self,
        host: &RestingPlace,
        one: Move,
        clock: &mut MoveClock,
    ) -> Result<Self> {
        let Self { tensors, .. } = self;
        if let Some(computed) = mark(host.outward.device())? {
            host.outward.wait(&computed)?;
        }
        let _outward = host.outward.enter()?;
        let copy = || each(tensors, |tensor| host.take(&tensor));
        let bytes = |there: &Tensors| there.iter().flatten().flatten().map(tensor_bytes).sum();
        let tensors = clock.moving(one, copy, bytes)?;
        let there = (host.outward.device() != Device::Cpu).then(|| Event::after(host.outward));
        Ok(Self { tensors, ready: there.transpose()?.map(Arc::new), rests: true })
    }

    /// What it takes, and when it is there, where that is to come.
    pub(crate) fn landing(&self) -> Option<(Arc<Event>, u64)> {
        let bytes = self.tensors.iter().flatten().flatten().map(tensor_bytes).sum();
        self.ready.clone().map(|ready| (ready, bytes))
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
    /// The parcel's tensors on this device, for this thread's work on it; brought by this move where they
    /// wait on the host.
    pub(crate) fn unpack(
        &self,
        parcel: StageParcel,
        one: Move,
        clock: &mut MoveClock,
    ) -> Result<Tensors> {
        let StageParcel { tensors, ready, rests } = parcel;
        let ready = ready.as_deref();
        // Workers of one device share its default stream, which keeps the order by itself.
        if !rests {
            return each(tensors, |tensor| self.finish(self.start(&tensor, ready)?));
        }
        let copy = || each(tensors, |tensor| self.start_from_host(&tensor, ready));
        let arriving = clock.moving_by(
            one,
            || self.moment_after(ready),
            copy,
            |arriving| arriving.iter().flatten().flatten().map(Arriving::bytes).sum(),
        )?;
        let finish = || each(arriving, |arriving| self.finish(arriving));
        clock.waiting(Awaited::Boundaries, finish)
    }

    fn start_from_host(&self, tensor: &Tensor, ready: Option<&Event>) -> Result<Arriving> {
        match self.device() {
            // The host is the device too, but its memory is another account.
            Device::Cpu => {
                let copy = copy_of(&tensor.f_detach()?)?;
                self.start(&copy.f_set_requires_grad(tensor.requires_grad())?, None)
            }
            _ => self.start(tensor, ready),
        }
    }

    /// The values of a parcel in which none is missing.
    pub(crate) fn unpack_values(
        &self,
        parcel: StageParcel,
        one: Move,
        clock: &mut MoveClock,
    ) -> Result<Vec<Tensor>> {
        Ok(self.unpack(parcel, one, clock)?.into_iter().flatten().flatten().collect())
    }
}

/// The same lists, with what `f` makes of each tensor.
fn each<T, U>(
    lists: Vec<Vec<Option<T>>>,
    mut f: impl FnMut(T) -> Result<U>,
) -> Result<Vec<Vec<Option<U>>>> {
    let mut list =
        |list: Vec<Option<T>>| list.into_iter().map(|t| t.map(&mut f).transpose()).collect();
    lists.into_iter().map(&mut list).collect()
}

fn mark(device: Device) -> Result<Option<Event>> {
    if device == Device::Cpu {
        return Ok(None);
    }
    Ok(Some(Event::after(Stream::current(device)?)?))
}
