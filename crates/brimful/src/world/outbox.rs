//! Tensors on their way from this rank, over one channel: computed, sent, gone.
//!
//! A device that works by itself puts what it computes into the host's memory some time later: it
//! sets out when it is there, and the thread that has ordered it goes on.

use std::collections::VecDeque;

use brimful_torch::stream::Event;
use tch::{Device, Tensor};

use super::error::WorldError;
use super::inbox::still;
use super::message::{TensorOutline, Tensors};
use super::wire::{Ticket, Wire};
use crate::Result;

/// One channel's tensors.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    waiting: VecDeque<Parcel>,
    sent: VecDeque<Vec<Ticket>>,
}

/// Tensors that are ready to be sent, but for numbers that a device is yet to put into them.
#[derive(Debug)]
pub(super) struct Parcel {
    pub(super) outline: TensorOutline,
    /// Those that are not missing: each contiguous, and in the host's memory.
    pub(super) tensors: Vec<Tensor>,
    /// When their numbers are there; none where they are.
    ready: Option<Event>,
}

impl Parcel {
    /// Packs tensors, of which those that are elsewhere than in the host's memory, or not contiguous,
    /// are copied: so this is done before the lock is taken, without which nobody hears of this rank.
    /// Numbers that come only when an event is reached come into contiguous memory of the host's.
    pub(super) fn pack(tensors: &Tensors, ready: Option<Event>) -> Result<Self> {
        let outline = TensorOutline::of(tensors)?;
        let host = |tensor: &Tensor| tensor.f_detach()?.f_to_device(Device::Cpu)?.f_contiguous();
        let tensors = tensors.iter().flatten().flatten().map(host).collect::<Result<_, _>>()?;
        Ok(Self { outline, tensors, ready })
    }
}

impl Outbox {
    pub(super) fn put(&mut self, parcel: Parcel) {
        self.waiting.push_back(parcel);
    }

    /// The next that can set out.
    pub(super) fn next(&mut self) -> Result<Option<Parcel>> {
        // In order, though a later one may be ready: the receiver tells parcels apart by their order.
        let Some(parcel) = self.waiting.front() else { return Ok(None) };
        Ok(match is_reached(parcel.ready.as_ref())? {
            true => self.waiting.pop_front(),
            false => None,
        })
    }

    /// The next has set out.
    pub(super) fn sent(&mut self, tickets: Vec<Ticket>) {
        self.sent.push_back(tickets);
    }

    /// Forgets what has gone.
    pub(super) fn advance(&mut self, wire: &mut dyn Wire) -> Result<(), WorldError> {
        while let Some(first) = self.sent.front_mut() {
            still(first, wire)?;
            if !first.is_empty() {
                break;
            }
            self.sent.pop_front();
        }
        Ok(())
    }

    /// Whether the next is still to be computed.
    pub(super) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// How many have not gone yet.
    pub(super) fn len(&self) -> usize {
        self.waiting.len() + self.sent.len()
    }

    /// What has set out and not gone yet.
    pub(super) fn into_tickets(self) -> impl Iterator<Item = Ticket> {
        self.sent.into_iter().flatten()
    }
}

pub(super) fn is_reached(event: Option<&Event>) -> Result<bool> {
    Ok(event.map_or(Ok(true), Event::is_reached)?)
}
