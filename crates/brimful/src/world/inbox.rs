//! Tensors on their way to this rank, over one channel: announced, arriving, there.
//!
//! A sender announces what it sends. Memory for it is taken, and the numbers asked for, as soon as
//! the channel has been opened here and has a place free; so they arrive while others compute, and
//! a sender that is ahead cannot fill this rank's memory.

use std::collections::VecDeque;

use tch::Tensor;

use super::error::WorldError;
use super::message::{Outline, Tensors, tags_from};
use super::wire::{Ticket, Wire};
use crate::Result;
use crate::memory::Memory;

/// One channel's tensors.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    announced: VecDeque<(i32, Outline)>,
    /// How many parcels may arrive ahead of their use; none before the channel is opened.
    places: usize,
    /// Where they are needed.
    memory: Option<Memory>,
    /// Tensors that the next parcels, of one tensor each, are to be put into.
    into: VecDeque<Tensor>,
    arriving: VecDeque<Arriving>,
    /// Why there is no memory for the next.
    refused: Option<crate::Error>,
}

#[derive(Debug)]
struct Arriving {
    outline: Outline,
    tensors: Tensors,
    tickets: Vec<Ticket>,
}

impl Inbox {
    pub(super) fn announce(&mut self, tag: i32, outline: Outline) {
        self.announced.push_back((tag, outline));
    }

    pub(super) fn open(&mut self, places: usize, memory: Option<Memory>) {
        (self.places, self.memory) = (places.max(1), memory);
    }

    /// Lets the next parcel of one tensor be put into this one.
    pub(super) fn take_into(&mut self, tensor: Tensor) {
        self.into.push_back(tensor);
    }

    /// Asks for what there are places for, and sees what has arrived.
    pub(super) fn advance(&mut self, wire: &mut dyn Wire, from: usize) -> Result<(), WorldError> {
        while self.refused.is_none() && self.arriving.len() < self.places {
            let Some((tag, outline)) = self.announced.pop_front() else { break };
            match self.into.pop_front().map_or_else(
                || outline.empty(self.memory.as_ref()),
                |tensor| Ok(vec![vec![Some(tensor)]]),
            ) {
                Ok(tensors) => {
                    let tickets = ask(wire, from, tag, &tensors)?;
                    self.arriving.push_back(Arriving { outline, tensors, tickets });
                }
                Err(error) => {
                    self.refused = Some(error);
                    self.announced.push_front((tag, outline));
                }
            }
        }
        self.arriving.iter_mut().try_for_each(|arriving| still(&mut arriving.tickets, wire))
    }

    /// Whether the next parcel is on its way.
    pub(super) fn is_expecting(&self) -> bool {
        !self.announced.is_empty() || !self.arriving.is_empty()
    }

    /// The next parcel, if all of it is there.
    pub(super) fn take(&mut self) -> Option<Result<Tensors>> {
        match self.arriving.front() {
            Some(next) if next.tickets.is_empty() => {}
            Some(_) => return None,
            None => return self.refused.clone().map(Err),
        }
        let Arriving { outline, tensors, .. } = self.arriving.pop_front()?;
        Some(outline.trace(&tensors).map(|()| tensors))
    }

    /// Whatever is still to come is received and dropped, so that its senders get rid of it.
    pub(super) fn discard(
        self,
        wire: &mut dyn Wire,
        from: usize,
    ) -> Result<Vec<Ticket>, WorldError> {
        let mut tickets: Vec<Ticket> = self.arriving.into_iter().flat_map(|a| a.tickets).collect();
        for (tag, outline) in self.announced {
            tickets.extend(discarded(wire, from, tag, &outline)?);
        }
        Ok(tickets)
    }
}

/// Receives what nobody needs.
pub(super) fn discarded(
    wire: &mut dyn Wire,
    from: usize,
    tag: i32,
    outline: &Outline,
) -> Result<Vec<Ticket>, WorldError> {
    let tensors = outline.empty(None).map_err(|error| WorldError::Message(error.to_string()))?;
    ask(wire, from, tag, &tensors)
}

fn ask(
    wire: &mut dyn Wire,
    from: usize,
    tag: i32,
    tensors: &Tensors,
) -> Result<Vec<Ticket>, WorldError> {
    let present = tensors.iter().flatten().flatten().zip(tags_from(tag));
    present.map(|(tensor, tag)| wire.receive(tensor.shallow_clone(), from, tag)).collect()
}

/// Keeps those that are not done.
pub(super) fn still(tickets: &mut Vec<Ticket>, wire: &mut dyn Wire) -> Result<(), WorldError> {
    while let Some(ticket) = tickets.last() {
        if !wire.is_done(*ticket)? {
            break;
        }
        tickets.pop();
    }
    Ok(())
}
