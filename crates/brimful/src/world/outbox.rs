//! Tensors on their way from this rank, over one channel: computed, sent, gone.
//!
//! A device that works by itself puts what it computes into the host's memory some time later: it
//! sets out when it is there, and the thread that has ordered it goes on.

use std::collections::VecDeque;

use brimful_torch::stream::Event;

use super::error::WorldError;
use super::inbox::still;
use super::message::Tensors;
use super::wire::{Ticket, Wire};
use crate::Result;

/// One channel's tensors.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    waiting: VecDeque<Parcel>,
    sent: VecDeque<Vec<Ticket>>,
}

/// Tensors in the host's memory, and when they are there: none where that is now.
#[derive(Debug)]
struct Parcel {
    tensors: Tensors,
    ready: Option<Event>,
}

impl Outbox {
    pub(super) fn put(&mut self, tensors: Tensors, ready: Option<Event>) {
        self.waiting.push_back(Parcel { tensors, ready });
    }

    /// The next that can set out.
    pub(super) fn next(&mut self) -> Result<Option<Tensors>> {
        let Some(parcel) = self.waiting.front() else { return Ok(None) };
        Ok(match is_reached(parcel.ready.as_ref())? {
            true => self.waiting.pop_front().map(|parcel| parcel.tensors),
            false => None,
        })
    }

    /// The next, as soon as it is there.
    pub(super) fn wait_for_next(&mut self) -> Result<Option<Tensors>> {
        let Some(Parcel { tensors, ready }) = self.waiting.pop_front() else { return Ok(None) };
        if let Some(ready) = ready {
            ready.synchronize()?;
        }
        Ok(Some(tensors))
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
