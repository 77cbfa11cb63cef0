//! Receiving end of a channel: tensors are announced, received, and taken.
//!
//! A sender announces its tensors. This rank allocates memory for them and posts the receives as soon as the
//! channel is open and has a free place. So data arrive while other threads compute, and a sender that is ahead
//! cannot fill this rank's memory. If a later tensor has the same MPI tag as an earlier one, the earlier tensor is
//! received ahead of its time, into temporary memory, and copied later.

use std::collections::VecDeque;

use brimful_torch::transfer;
use tch::Tensor;

use super::error::WorldError;
use super::message::{TensorOutline, Tensors};
use super::waits::Wait;
use super::wire::{Ticket, Wire};
use crate::Result;
use crate::memory::Memory;

/// Receiving end of one channel.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    announced: VecDeque<Announced>,
    /// Number of transfers that may arrive ahead of their use; 0 before the channel is opened.
    places: usize,
    /// Memory in which the tensors are needed.
    memory: Option<Memory>,
    /// Destinations of the next transfers, of one tensor each.
    into: VecDeque<Tensor>,
    arriving: VecDeque<Incoming>,
    /// Error of allocating memory for the next transfer.
    refused: Option<crate::Error>,
}

#[derive(Debug)]
struct Announced {
    /// Number of the transfer's first tensor.
    first: u64,
    outline: TensorOutline,
    /// Temporary tensors and pending receives, if the transfer is received ahead of its time.
    ahead: Option<(Tensors, Vec<Ticket>)>,
}

#[derive(Debug)]
struct Incoming {
    outline: TensorOutline,
    tensors: Tensors,
    tickets: Vec<Ticket>,
    /// Temporary tensors that hold the data, if the transfer was received ahead of its time.
    ahead: Option<Tensors>,
}

impl Inbox {
    pub(super) fn announce(&mut self, first: u64, outline: TensorOutline) {
        self.announced.push_back(Announced { first, outline, ahead: None });
    }

    /// Returns the number of the first tensor without a posted receive.
    pub(super) fn oldest(&self) -> Option<u64> {
        self.announced.iter().find(|message| message.ahead.is_none()).map(|message| message.first)
    }

    /// Posts the receives of all transfers whose first tensor has a number below `before`, even without free
    /// places.
    pub(super) fn ask_ahead(
        &mut self,
        wire: &mut dyn Wire,
        from: usize,
        before: u64,
    ) -> Result<(), WorldError> {
        let old = self.announced.iter_mut().filter(|p| p.ahead.is_none() && p.first < before);
        for Announced { first, outline, ahead } in old {
            let tensors = uncharged(outline)?;
            let tickets = ask(wire, from, *first, &tensors)?;
            *ahead = Some((tensors, tickets));
        }
        Ok(())
    }

    pub(super) fn open(&mut self, places: usize, memory: Option<Memory>) {
        self.places = places.max(1);
        self.memory = memory;
    }

    /// Sets a tensor as the destination of a later transfer of one tensor.
    pub(super) fn take_into(&mut self, tensor: Tensor) {
        self.into.push_back(tensor);
    }

    /// Posts receives for all free places, and checks which have completed.
    pub(super) fn advance(&mut self, wire: &mut dyn Wire, from: usize) -> Result<(), WorldError> {
        while self.refused.is_none() && self.arriving.len() < self.places {
            let Some(message) = self.announced.pop_front() else { break };
            match self.allocate(&message.outline) {
                Ok(tensors) => {
                    let Announced { first, outline, ahead } = message;
                    let (ahead, tickets) = match ahead {
                        Some((ahead, tickets)) => (Some(ahead), tickets),
                        None => (None, ask(wire, from, first, &tensors)?),
                    };
                    self.arriving.push_back(Incoming { outline, tensors, tickets, ahead });
                }
                // The error is kept for the thread that takes the transfer, because this thread may only be making
                // progress on messages.
                Err(error) => {
                    self.refused = Some(error);
                    self.announced.push_front(message);
                }
            }
        }
        self.arriving.iter_mut().try_for_each(|arriving| still(&mut arriving.tickets, wire))
    }

    /// Returns the tensors to receive the next transfer in.
    fn allocate(&mut self, outline: &TensorOutline) -> Result<Tensors> {
        let Some(tensor) = self.into.pop_front() else {
            return outline.empty(self.memory.as_ref());
        };
        outline.check_fits(&tensor)?;
        Ok(vec![vec![Some(tensor)]])
    }

    /// Returns the reason why the next transfer is not complete.
    pub(super) fn waits_for(&self, from: usize) -> Wait {
        match self.announced.is_empty() && self.arriving.is_empty() {
            true => Wait::Rank(from),
            false => Wait::Message(from),
        }
    }

    /// Returns whether the next transfer is complete.
    pub(super) fn is_there(&self) -> bool {
        self.arriving.front().is_some_and(|next| next.tickets.is_empty())
    }

    /// Takes the next transfer, if it is complete.
    pub(super) fn take(&mut self) -> Option<Result<Tensors>> {
        // Transfers that arrived before memory ran out are complete, and come first.
        if self.arriving.is_empty() {
            return self.refused.clone().map(Err);
        }
        if !self.is_there() {
            return None;
        }
        let Incoming { outline, tensors, ahead, .. } = self.arriving.pop_front()?;
        let placed = ahead.map_or(Ok(()), |ahead| put(&tensors, &ahead));
        Some(placed.and_then(|()| outline.trace(&tensors)).map(|()| tensors))
    }

    /// Receives and drops all pending transfers, so that their senders can free them.
    pub(super) fn discard(
        self,
        wire: &mut dyn Wire,
        from: usize,
    ) -> Result<Vec<Ticket>, WorldError> {
        let mut tickets: Vec<Ticket> = self.arriving.into_iter().flat_map(|a| a.tickets).collect();
        for Announced { first, outline, ahead } in self.announced {
            tickets.extend(match ahead {
                Some((_, tickets)) => tickets,
                None => discarded(wire, from, first, &outline)?,
            });
        }
        Ok(tickets)
    }
}

/// Receives tensors to drop them.
pub(super) fn discarded(
    wire: &mut dyn Wire,
    from: usize,
    first: u64,
    outline: &TensorOutline,
) -> Result<Vec<Ticket>, WorldError> {
    ask(wire, from, first, &uncharged(outline)?)
}

fn ask(
    wire: &mut dyn Wire,
    from: usize,
    first: u64,
    tensors: &Tensors,
) -> Result<Vec<Ticket>, WorldError> {
    let present = tensors.iter().flatten().flatten().zip(first..);
    present.map(|(tensor, number)| wire.receive(tensor.shallow_clone(), from, number)).collect()
}

/// Copies tensors that were received ahead of their time to their destination.
fn put(tensors: &Tensors, ahead: &Tensors) -> Result<()> {
    let all = tensors.iter().flatten().flatten().zip(ahead.iter().flatten().flatten());
    all.into_iter().try_for_each(|(tensor, ahead)| {
        Ok(transfer::copy(&tensor.f_view([-1_i64])?, &ahead.f_view([-1_i64])?)?)
    })
}

/// Allocates memory that is charged to no arena of this rank.
fn uncharged(outline: &TensorOutline) -> Result<Tensors, WorldError> {
    outline.empty(None).map_err(|error| WorldError::Message(error.to_string()))
}

/// Drops the tickets of completed messages.
pub(super) fn still(tickets: &mut Vec<Ticket>, wire: &mut dyn Wire) -> Result<(), WorldError> {
    // Removes from the end, which moves no other ticket. The order of completion does not matter.
    while let Some(ticket) = tickets.last() {
        if !wire.is_done(*ticket)? {
            break;
        }
        tickets.pop();
    }
    Ok(())
}
