//! What carries messages from rank to rank: MPI, or nothing where a process is alone.

use std::fmt::Debug;

use tch::Tensor;

use super::error::WorldError;

/// A message under way, by number.
pub(super) type Ticket = u64;

/// Carries messages. Nothing here waits.
pub(super) trait Wire: Debug + Send {
    /// This process's number, and how many there are.
    fn place(&self) -> (usize, usize);

    /// The name of this machine.
    fn host(&self) -> String;

    /// Lets a small message set out, of which the receiver knows nothing beforehand.
    fn tell(&mut self, to: usize, bytes: Vec<u8>) -> Result<Ticket, WorldError>;

    /// The next small message that has come, with its sender.
    fn told(&mut self) -> Result<Option<(usize, Vec<u8>)>, WorldError>;

    /// How many tensors from one rank are told apart by their numbers. Of those whose numbers are a
    /// multiple of this apart, the one that was sent first goes to who asked first.
    fn tags(&self) -> u64;

    /// Lets the numbers of a contiguous tensor in the host's memory set out, as that of this number.
    fn send(&mut self, tensor: Tensor, to: usize, number: u64) -> Result<Ticket, WorldError>;

    /// Lets the tensor of this number be filled in.
    fn receive(&mut self, tensor: Tensor, from: usize, number: u64) -> Result<Ticket, WorldError>;

    /// Whether the message is done, after which its number is no more.
    fn is_done(&mut self, ticket: Ticket) -> Result<bool, WorldError>;

    /// Ends in order, when all ranks do.
    fn end(self: Box<Self>);
}

/// A process without others.
#[derive(Debug)]
pub(super) struct Alone;

impl Wire for Alone {
    fn place(&self) -> (usize, usize) {
        (0, 1)
    }

    fn host(&self) -> String {
        "this machine".into()
    }

    fn tell(&mut self, _: usize, _: Vec<u8>) -> Result<Ticket, WorldError> {
        Ok(0)
    }

    fn told(&mut self) -> Result<Option<(usize, Vec<u8>)>, WorldError> {
        Ok(None)
    }

    fn tags(&self) -> u64 {
        u64::MAX
    }

    fn send(&mut self, _: Tensor, _: usize, _: u64) -> Result<Ticket, WorldError> {
        Ok(0)
    }

    fn receive(&mut self, _: Tensor, _: usize, _: u64) -> Result<Ticket, WorldError> {
        Ok(0)
    }

    fn is_done(&mut self, _: Ticket) -> Result<bool, WorldError> {
        Ok(true)
    }

    fn end(self: Box<Self>) {}
}
