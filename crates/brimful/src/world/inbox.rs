//! Tensors on their way to this rank, over one channel: announced, arriving, there.
//!
//! A sender announces what it sends. Memory for it is taken, and the numbers asked for, as soon as
//! the channel has been opened here and has a place free; so they arrive while others compute, and
//! a sender that is ahead cannot fill this rank's memory. Only what later tensors could be taken for,
//! because the wire tells no more apart, is asked for before that, and put in its place then.

use std::collections::VecDeque;

use brimful_torch::transfer;
use tch::Tensor;

use super::error::WorldError;
use super::message::{TensorOutline, Tensors};
use super::waits::Wait;
use super::wire::{Ticket, Wire};
use crate::Result;
use crate::memory::Memory;

/// One channel's tensors.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    announced: VecDeque<Announced>,
    /// How many parcels may arrive ahead of their use; none before the channel is opened.
    places: usize,
    /// Where they are needed.
    memory: Option<Memory>,
    /// Tensors that the next parcels, of one tensor each, are to be put into.
    into: VecDeque<Tensor>,
    arriving: VecDeque<Incoming>,
    /// Why there is no memory for the next.
    refused: Option<crate::Error>,
}

#[derive(Debug)]
struct Announced {
    /// The number of its first tensor.
    first: u64,
    outline: TensorOutline,
    /// What it arrives in, and what of it is still to come, where it was asked for ahead of its time.
    ahead: Option<(Tensors, Vec<Ticket>)>,
}

#[derive(Debug)]
struct Incoming {
    outline: TensorOutline,
    tensors: Tensors,
    tickets: Vec<Ticket>,
    /// Where the numbers are, if they arrive elsewhere than in the tensors.
    ahead: Option<Tensors>,
}

impl Inbox {
    pub(super) fn announce(&mut self, first: u64, outline: TensorOutline) {
        self.announced.push_back(Announced { first, outline, ahead: None });
    }

    /// The number of the first tensor that has not been asked for.
    pub(super) fn oldest(&self) -> Option<u64> {
        self.announced.iter().find(|parcel| parcel.ahead.is_none()).map(|parcel| parcel.first)
    }

    /// Asks for all parcels that begin before this number, whether or not there are places.
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

    /// Lets the next parcel of one tensor be put into this one.
    pub(super) fn take_into(&mut self, tensor: Tensor) {
        self.into.push_back(tensor);
    }

    /// Asks for what there are places for, and sees what has arrived.
    pub(super) fn advance(&mut self, wire: &mut dyn Wire, from: usize) -> Result<(), WorldError> {
        while self.refused.is_none() && self.arriving.len() < self.places {
            let Some(parcel) = self.announced.pop_front() else { break };
            match self.room_for(&parcel.outline) {
                Ok(tensors) => {
                    let Announced { first, outline, ahead } = parcel;
                    let (ahead, tickets) = match ahead {
                        Some((ahead, tickets)) => (Some(ahead), tickets),
                        None => (None, ask(wire, from, first, &tensors)?),
                    };
                    self.arriving.push_back(Incoming { outline, tensors, tickets, ahead });
                }
                // Kept for the thread that takes it: whoever moves messages on is not to blame.
                Err(error) => {
                    self.refused = Some(error);
                    self.announced.push_front(parcel);
                }
            }
        }
        self.arriving.iter_mut().try_for_each(|arriving| still(&mut arriving.tickets, wire))
    }

    /// Where the next parcel is to be.
    fn room_for(&mut self, outline: &TensorOutline) -> Result<Tensors> {
        let Some(tensor) = self.into.pop_front() else {
            return outline.empty(self.memory.as_ref());
        };
        outline.check_fits(&tensor)?;
        Ok(vec![vec![Some(tensor)]])
    }

    /// What keeps the next parcel, of this rank, from being there.
    pub(super) fn waits_for(&self, from: usize) -> Wait {
        match self.announced.is_empty() && self.arriving.is_empty() {
            true => Wait::Rank(from),
            false => Wait::Message(from),
        }
    }

    /// Whether all of the next parcel is there.
    pub(super) fn is_there(&self) -> bool {
        self.arriving.front().is_some_and(|next| next.tickets.is_empty())
    }

    /// The next parcel, if all of it is there.
    pub(super) fn take(&mut self) -> Option<Result<Tensors>> {
        // What has arrived before memory ran out is whole, and comes first.
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

    /// Whatever is still to come is received and dropped, so that its senders get rid of it.
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

/// Receives what nobody needs.
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

/// Puts what has arrived elsewhere in its place.
fn put(tensors: &Tensors, ahead: &Tensors) -> Result<()> {
    let all = tensors.iter().flatten().flatten().zip(ahead.iter().flatten().flatten());
    all.into_iter().try_for_each(|(tensor, ahead)| {
        Ok(transfer::copy(&tensor.f_view([-1_i64])?, &ahead.f_view([-1_i64])?)?)
    })
}

/// Room for what nobody here has asked for.
fn uncharged(outline: &TensorOutline) -> Result<Tensors, WorldError> {
    outline.empty(None).map_err(|error| WorldError::Message(error.to_string()))
}

/// Keeps those that are not done.
pub(super) fn still(tickets: &mut Vec<Ticket>, wire: &mut dyn Wire) -> Result<(), WorldError> {
    // From the end, where removing is free; which of them is done first does not matter.
    while let Some(ticket) = tickets.last() {
        if !wire.is_done(*ticket)? {
            break;
        }
        tickets.pop();
    }
    Ok(())
}
