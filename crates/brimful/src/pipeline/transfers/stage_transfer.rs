//! Transfers tensors from stage to stage, with an event for when the sender's device has computed them.
//!
//! On one device, and between CPU devices, a stage passes tensors on without a copy, and their memory stays
//! charged to the arena that it came from. Otherwise [`CopyStreams`] transfers them.

use std::sync::Arc;

use brimful_torch::stream::{Event, Stream};
use brimful_torch::transfer;
use tch::{Device, Tensor};

use super::clock::TransferClock;
use crate::Result;
use crate::batch::{copy_of, tensor_bytes};
use crate::memory::Arena;
use crate::streams::{Arriving, CopyStreams};
/// Tensors of a transfer; gradients have one list for each group of loss terms.
pub(crate) use crate::world::Tensors;
use brimful_plan::schedule::{Awaited, Transfer};

/// Host staging memory for transfers that wait.
#[derive(Debug, Clone)]
pub(crate) struct HostStaging {
    pub(crate) outward: Stream,
    /// Arena that the copies are charged to.
    arena: Option<Arena>,
}

impl HostStaging {
    pub(crate) fn new(device: Device, arena: Option<Arena>) -> Result<Self> {
        Ok(Self { outward: Stream::new(device)?, arena })
    }

    /// Queues a copy to the host on the stream `outward`, which this thread has entered.
    fn copy(&self, tensor: &Tensor) -> Result<Tensor> {
        let staged = {
            let _charged = self.arena.as_ref().map(Arena::enter);
            // Keeps the memory format, channels last included: layers are slow when it changes.
            transfer::empty_pinned_like(tensor)?
        };
        transfer::copy(&staged, tensor)?;
        // The allocator must not reuse the tensor's memory before it is copied.
        self.outward.record_stream(tensor)?;
        Ok(staged.f_set_requires_grad(tensor.requires_grad())?)
    }
}

/// Tensors that one stage sends to another.
#[derive(Debug)]
pub(crate) struct StageTransfer {
    tensors: Tensors,
    /// Event after which the tensors are complete, on the sender's device or on the host; none if they
    /// already are, or if the receiver's work follows the sender's on one stream.
    ready: Option<Arc<Event>>,
    /// Whether the tensors wait on the host, because the device has too few free bytes.
    pub(crate) is_staged: bool,
}

impl StageTransfer {
    /// Wraps tensors that this thread itself will use, or that came from another rank.
    pub(crate) fn pack(tensors: Tensors) -> Self {
        Self { tensors, ready: None, is_staged: false }
    }

    /// Records an event after this thread's work on `device`, for another worker.
    pub(crate) fn with_event(self, device: Device) -> Result<Self> {
        Ok(Self { ready: event_on(device)?.map(Arc::new), ..self })
    }

    /// Copies the tensors to the host as this transfer, after this thread's queued work on the device.
    pub(crate) fn stage(
        self,
        host: &HostStaging,
        one: Transfer,
        clock: &mut TransferClock,
    ) -> Result<Self> {
        let Self { tensors, .. } = self;
        if let Some(computed) = event_on(host.outward.device())? {
            host.outward.wait(&computed)?;
        }
        let _outward = host.outward.enter()?;
        let copy = || each(tensors, |tensor| host.copy(&tensor));
        let bytes = |there: &Tensors| there.iter().flatten().flatten().map(tensor_bytes).sum();
        let tensors = clock.transfer(one, copy, bytes)?;
        let there = (host.outward.device() != Device::Cpu).then(|| Event::after(host.outward));
        Ok(Self { tensors, ready: there.transpose()?.map(Arc::new), is_staged: true })
    }

    /// Returns the event at which the transfer is done, and its bytes; none if there is nothing to wait
    /// for.
    pub(crate) fn completion(&self) -> Option<(Arc<Event>, u64)> {
        let bytes = self.tensors.iter().flatten().flatten().map(tensor_bytes).sum();
        self.ready.clone().map(|ready| (ready, bytes))
    }

    /// Returns a shallow clone, to unpack a second time.
    pub(crate) fn share(&self) -> Self {
        let share = |tensor: &Option<Tensor>| tensor.as_ref().map(Tensor::shallow_clone);
        Self {
            tensors: self.tensors.iter().map(|list| list.iter().map(share).collect()).collect(),
            ready: self.ready.clone(),
            is_staged: self.is_staged,
        }
    }

    /// Copies the tensors to the host, from which they go to another rank; returns an event for when they
    /// are there. The device copies them after its queued work, and no thread waits.
    pub(crate) fn on_host(self) -> Result<(Tensors, Option<Event>)> {
        // Ignores the event: this thread packed the tensors, and the copy follows on the same stream.
        let Self { mut tensors, .. } = self;
        let mut sender = Device::Cpu;
        for tensor in tensors.iter_mut().flatten().flatten() {
            if tensor.device() != Device::Cpu {
                sender = tensor.device();
                // Pinned: a copy to pageable memory would make this thread wait for all work of the device.
                let host = transfer::empty_pinned(tensor)?;
                transfer::copy(&host, tensor)?;
                *tensor = host.f_set_requires_grad(tensor.requires_grad())?;
            }
        }
        Ok((tensors, event_on(sender)?))
    }

    pub(crate) fn values(values: Vec<Tensor>) -> Self {
        Self::pack(vec![values.into_iter().map(Some).collect()])
    }
}

impl CopyStreams {
    /// Copies the tensors to this device, ready for this thread's work on it. If the tensors waited on the host,
    /// times the copy as the transfer `one`.
    pub(crate) fn unpack(
        &self,
        transfer: StageTransfer,
        one: Transfer,
        clock: &mut TransferClock,
    ) -> Result<Tensors> {
        let StageTransfer { tensors, ready, is_staged } = transfer;
        let ready = ready.as_deref();
        // Workers of one device share its default stream, which keeps their order.
        if !is_staged {
            return each(tensors, |tensor| self.finish(self.start(&tensor, ready)?));
        }
        let copy = || each(tensors, |tensor| self.start_from_host(&tensor, ready));
        let arriving = clock.transfer_by(
            one,
            || self.event_after(ready),
            copy,
            |arriving| arriving.iter().flatten().flatten().map(Arriving::bytes).sum(),
        )?;
        let finish = || each(arriving, |arriving| self.finish(arriving));
        clock.waiting(Awaited::Boundaries, finish)
    }

    fn start_from_host(&self, tensor: &Tensor, ready: Option<&Event>) -> Result<Arriving> {
        match self.device {
            // Host and device share the memory, but charge it to different arenas.
            Device::Cpu => {
                let copy = copy_of(&tensor.f_detach()?)?;
                self.start(&copy.f_set_requires_grad(tensor.requires_grad())?, None)
            }
            _ => self.start(tensor, ready),
        }
    }

    /// Unpacks a transfer that has no missing tensor.
    pub(crate) fn unpack_values(
        &self,
        transfer: StageTransfer,
        one: Transfer,
        clock: &mut TransferClock,
    ) -> Result<Vec<Tensor>> {
        Ok(self.unpack(transfer, one, clock)?.into_iter().flatten().flatten().collect())
    }
}

/// Maps `f` over the tensors of all lists.
fn each<T, U>(
    lists: Vec<Vec<Option<T>>>,
    mut f: impl FnMut(T) -> Result<U>,
) -> Result<Vec<Vec<Option<U>>>> {
    let mut list =
        |list: Vec<Option<T>>| list.into_iter().map(|t| t.map(&mut f).transpose()).collect();
    lists.into_iter().map(&mut list).collect()
}

fn event_on(device: Device) -> Result<Option<Event>> {
    if device == Device::Cpu {
        return Ok(None);
    }
    Ok(Some(Event::after(Stream::current(device)?)?))
}
