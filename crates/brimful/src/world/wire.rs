//! Transport of messages between ranks.

use std::fmt::Debug;

use tch::Tensor;

use super::error::WorldError;

/// Number of a pending message.
pub(super) type Ticket = u64;

/// Transport of messages. No method waits.
pub(super) trait Wire: Debug + Send {
    /// Returns this process's number and the number of processes.
    fn place(&self) -> (usize, usize);

    /// Returns the name of this machine.
    fn host(&self) -> String;

    /// Sends a small message, which the receiver does not expect.
    fn tell(&mut self, to: usize, bytes: Vec<u8>) -> Result<Ticket, WorldError>;

    /// Returns the next small message received, with its sender.
    fn told(&mut self) -> Result<Option<(usize, Vec<u8>)>, WorldError>;

    /// Returns the number of tags. Tensors from one rank whose numbers differ by a multiple of this number have
    /// the same tag, and are matched with receives in order.
    fn tags(&self) -> u64;

    /// Sends the data of a contiguous tensor in host memory, as tensor `number`.
    fn send(&mut self, tensor: Tensor, to: usize, number: u64) -> Result<Ticket, WorldError>;

    /// Receives tensor `number` into `tensor`.
    fn receive(&mut self, tensor: Tensor, from: usize, number: u64) -> Result<Ticket, WorldError>;

    /// Returns whether the message is complete, which ends its ticket.
    fn is_done(&mut self, ticket: Ticket) -> Result<bool, WorldError>;

    /// Ends in order, together with all ranks.
    fn end(self: Box<Self>);
}
