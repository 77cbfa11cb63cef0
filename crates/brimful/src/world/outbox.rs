//! Sending end of a channel: transfers wait for their device, are sent, and complete.
//!
//! An asynchronous device copies its results to host memory some time later. Only then is the transfer sent;
//! the calling thread does not wait.

use std::collections::VecDeque;

use brimful_torch::stream::Event;
use tch::{Device, Tensor};

use super::error::WorldError;
use super::inbox::still;
use super::message::{TensorOutline, Tensors};
use super::wire::{Ticket, Wire};
use crate::Result;

/// Sending end of one channel.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    waiting: VecDeque<OutgoingMessage>,
    sent: VecDeque<Vec<Ticket>>,
}

/// Tensors ready to be sent, except for data that a device still has to write.
#[derive(Debug)]
pub(super) struct OutgoingMessage {
    pub(super) outline: TensorOutline,
    /// Tensors that are not missing: each contiguous, and in host memory.
    pub(super) tensors: Vec<Tensor>,
    /// Event after which the tensors' data are complete; `None` if they already are.
    ready: Option<Event>,
}

impl OutgoingMessage {
    /// Packs tensors; copies those that are not in host memory or not contiguous. Call it before taking the
    /// lock: heartbeats of this rank need the lock. Tensors whose data arrive with an event must be
    /// contiguous host memory.
    pub(super) fn pack(tensors: &Tensors, ready: Option<Event>) -> Result<Self> {
        let outline = TensorOutline::of(tensors)?;
        let host = |tensor: &Tensor| tensor.f_detach()?.f_to_device(Device::Cpu)?.f_contiguous();
        let tensors = tensors.iter().flatten().flatten().map(host).collect::<Result<_, _>>()?;
        Ok(Self { outline, tensors, ready })
    }
}

impl Outbox {
    pub(super) fn put(&mut self, message: OutgoingMessage) {
        self.waiting.push_back(message);
    }

    /// Returns the next transfer if it can be sent.
    pub(super) fn next(&mut self) -> Result<Option<OutgoingMessage>> {
        // Sent in order, even if a later transfer is ready first, because the receiver identifies transfers by
        // their order.
        let Some(message) = self.waiting.front() else { return Ok(None) };
        Ok(match is_reached(message.ready.as_ref())? {
            true => self.waiting.pop_front(),
            false => None,
        })
    }

    /// Records the pending sends of a transfer.
    pub(super) fn sent(&mut self, tickets: Vec<Ticket>) {
        self.sent.push_back(tickets);
    }

    /// Drops completed transfers.
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

    /// Returns whether a transfer still waits for its device.
    pub(super) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Returns the number of transfers that are not complete.
    pub(super) fn len(&self) -> usize {
        self.waiting.len() + self.sent.len()
    }

    /// Returns the pending sends.
    pub(super) fn into_tickets(self) -> impl Iterator<Item = Ticket> {
        self.sent.into_iter().flatten()
    }
}

pub(super) fn is_reached(event: Option<&Event>) -> Result<bool> {
    Ok(event.map_or(Ok(true), Event::is_reached)?)
}
