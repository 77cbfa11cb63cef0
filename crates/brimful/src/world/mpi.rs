//! Wire between ranks over MPI.

use std::collections::HashMap;
use std::time::Duration;

use brimful_torch::mpi::{Buffer, Mpi, MpiError, MpiLine, MpiMessage};
use tch::Tensor;

use super::error::WorldError;
use super::wire::{Ticket, Wire};

/// Number of tags that every MPI provides.
const TAGS: u64 = 1 << 15;

/// MPI with its pending messages.
#[derive(Debug)]
pub(super) struct MpiWire {
    mpi: Mpi,
    pending: HashMap<Ticket, MpiMessage>,
    next: Ticket,
}

impl MpiWire {
    pub(super) fn start(limit: Duration) -> Result<Self, WorldError> {
        let not_started = |error: MpiError| WorldError::NotStarted { reason: error.to_string() };
        let mpi = Mpi::start(limit).map_err(not_started)?;
        Ok(Self { mpi, pending: HashMap::new(), next: 0 })
    }

    fn keep(&mut self, pending: Result<MpiMessage, MpiError>) -> Result<Ticket, WorldError> {
        self.next += 1;
        self.pending.insert(self.next, pending.map_err(failed)?);
        Ok(self.next)
    }
}

impl Wire for MpiWire {
    fn place(&self) -> (usize, usize) {
        (self.mpi.rank(), self.mpi.size())
    }

    fn host(&self) -> String {
        self.mpi.host()
    }

    fn tell(&mut self, to: usize, bytes: Vec<u8>) -> Result<Ticket, WorldError> {
        // Sent on a communicator of its own, so that a small message is not mistaken for the data of a
        // tensor.
        let pending = self.mpi.send(MpiLine::Control, Buffer::Bytes(bytes), to, 0);
        self.keep(pending)
    }

    fn told(&mut self) -> Result<Option<(usize, Vec<u8>)>, WorldError> {
        self.mpi.incoming().map_err(failed)
    }

    fn tags(&self) -> u64 {
        TAGS
    }

    fn send(&mut self, tensor: Tensor, to: usize, number: u64) -> Result<Ticket, WorldError> {
        let pending = self.mpi.send(MpiLine::Data, Buffer::Tensor(tensor), to, tag(number));
        self.keep(pending)
    }

    fn receive(&mut self, tensor: Tensor, from: usize, number: u64) -> Result<Ticket, WorldError> {
        let pending = self.mpi.receive(MpiLine::Data, Buffer::Tensor(tensor), from, tag(number));
        self.keep(pending)
    }

    fn is_done(&mut self, ticket: Ticket) -> Result<bool, WorldError> {
        let Some(pending) = self.pending.get_mut(&ticket) else { return Ok(true) };
        // Tested, never waited for: the lock is held, and a dead rank's message would never complete.
        let done = self.mpi.is_done(pending).map_err(failed)?;
        if done {
            self.pending.remove(&ticket);
        }
        Ok(done)
    }

    fn end(self: Box<Self>) {
        self.mpi.end();
    }
}

fn tag(number: u64) -> i32 {
    (number % TAGS) as i32
}

fn failed(error: MpiError) -> WorldError {
    WorldError::Message(error.to_string())
}
