//! Turns, and what goes over their channels: parcels from rank to rank, and sums over all of them.

use brimful_torch::stream::Event;
use tch::{Device, Tensor};

use super::Engine;
use crate::Result;
use crate::world::error::WorldError;
use crate::world::inbox::Inbox;
use crate::world::message::{self, Channel, Message, Outline, Tensors};
use crate::world::outbox::Outbox;
use crate::world::ring::Ring;
use crate::world::wire::Ticket;

impl Engine {
    /// Begins a turn, whose channels are its own. All ranks begin the same turns in the same order.
    pub(in crate::world) fn begin(&mut self) -> u64 {
        self.turns += 1;
        self.open.insert(self.turns);
        self.turns
    }

    /// Ends a turn: what is still to come is of no use.
    pub(in crate::world) fn close(&mut self, turn: u64) {
        self.open.remove(&turn);
        let has_failed = self.stopped.remove(&turn);
        self.rings.retain(|channel, _| channel.turn != turn);
        let over: Vec<_> = self.inboxes.keys().filter(|(_, c)| c.turn == turn).copied().collect();
        for key in over {
            let inbox = self.inboxes.remove(&key).unwrap_or_default();
            match inbox.discard(&mut *self.wire, key.0) {
                Ok(tickets) => self.forgotten.extend(tickets),
                Err(error) => drop(self.broken.get_or_insert(error)),
            }
        }
        let over: Vec<_> = self.outboxes.keys().filter(|(_, c)| c.turn == turn).copied().collect();
        for key in over {
            let mut outbox = self.outboxes.remove(&key).unwrap_or_default();
            // Others may still need what is being computed.
            if !has_failed && let Err(error) = self.send_all(key, &mut outbox) {
                self.broken.get_or_insert(message_of(error));
            }
            self.forgotten.extend(outbox.into_tickets());
        }
    }

    /// Tells all ranks that a turn has failed here.
    pub(in crate::world) fn stop(&mut self, turn: u64) {
        if self.stopped.insert(turn) {
            self.tell_all(&Message::Stop { turn });
        }
    }

    pub(in crate::world) fn is_stopped(&self, turn: u64) -> bool {
        self.stopped.contains(&turn)
    }

    /// Lets tensors set out, as soon as their device has put them into the host's memory.
    pub(in crate::world) fn send(
        &mut self,
        to: usize,
        channel: Channel,
        tensors: Tensors,
        ready: Option<Event>,
    ) -> Result<()> {
        self.outboxes.entry((to, channel)).or_default().put(tensors, ready);
        self.send_ready((to, channel))
    }

    /// Sends what a channel can send now.
    fn send_ready(&mut self, key: (usize, Channel)) -> Result<()> {
        while let Some(tensors) = self.outboxes.entry(key).or_default().next()? {
            let tickets = self.set_out(key, &tensors)?;
            self.outboxes.entry(key).or_default().sent(tickets);
        }
        Ok(())
    }

    /// Waits for what is to be sent, and sends it.
    fn send_all(&mut self, key: (usize, Channel), outbox: &mut Outbox) -> Result<()> {
        while let Some(tensors) = outbox.wait_for_next()? {
            outbox.sent(self.set_out(key, &tensors)?);
        }
        Ok(())
    }

    pub(super) fn advance_outboxes(&mut self) -> Result<(), WorldError> {
        let waiting = self.outboxes.iter().filter(|(_, outbox)| outbox.is_waiting());
        let waiting: Vec<_> = waiting.map(|(key, _)| *key).collect();
        for key in waiting {
            self.send_ready(key).map_err(message_of)?;
        }
        self.outboxes.values_mut().try_for_each(|outbox| outbox.advance(&mut *self.wire))
    }

    /// Announces tensors and sends them.
    fn set_out(
        &mut self,
        (to, channel): (usize, Channel),
        tensors: &Tensors,
    ) -> Result<Vec<Ticket>> {
        let outline = Outline::of(tensors)?;
        let mut rows = Vec::new();
        for tensor in tensors.iter().flatten().flatten() {
            rows.push(tensor.f_detach()?.f_to_device(Device::Cpu)?.f_contiguous()?);
        }
        let mut tags = message::tags_from(self.tag);
        let tag = self.tag;
        let announced = Message::Tensors { channel, tag, outline }.encode()?;
        let announced = self.wire.tell(to, announced)?;
        self.forgotten.push(announced);
        let mut tickets = Vec::new();
        for (tensor, tag) in rows.into_iter().zip(&mut tags) {
            self.traffic.count(&tensor);
            tickets.push(self.wire.send(tensor, to, tag)?);
        }
        self.tag = tags.next().unwrap_or_default();
        Ok(tickets)
    }

    /// How many parcels of a channel have not gone yet.
    pub(in crate::world) fn outstanding(&self, to: usize, channel: Channel) -> usize {
        self.outboxes.get(&(to, channel)).map_or(0, Outbox::len)
    }

    /// Whether this rank's own device is yet to compute what a channel sends next.
    pub(in crate::world) fn is_computing(&self, to: usize, channel: Channel) -> bool {
        self.outboxes.get(&(to, channel)).is_some_and(Outbox::is_waiting)
    }

    /// Whether devices are about to put something into the host's memory that is to be sent.
    pub(in crate::world) fn expects_a_device(&self) -> bool {
        self.outboxes.values().any(Outbox::is_waiting) || self.rings.values().any(Ring::is_waiting)
    }

    pub(in crate::world) fn inbox(&mut self, from: usize, channel: Channel) -> &mut Inbox {
        self.inboxes.entry((from, channel)).or_default()
    }

    pub(super) fn advance_rings(&mut self) -> Result<(), WorldError> {
        let channels: Vec<Channel> = self.rings.keys().copied().collect();
        for channel in channels {
            let Some(mut ring) = self.rings.remove(&channel) else { continue };
            let advanced = ring.advance(self, channel);
            self.rings.insert(channel, ring);
            advanced.map_err(message_of)?;
        }
        Ok(())
    }

    /// The rank whose part of a sum is next.
    pub(in crate::world) fn ring_waits_for(&mut self, channel: Channel) -> Option<usize> {
        let before = self.rings.get(&channel)?.before();
        (!self.inbox(before, channel).is_expecting()).then_some(before)
    }

    pub(in crate::world) fn take_ring(&mut self, channel: Channel) -> Option<Tensor> {
        self.rings.get(&channel).filter(|ring| ring.is_done())?;
        self.rings.remove(&channel).map(Ring::into_sum)
    }
}

fn message_of(error: crate::Error) -> WorldError {
    match error {
        crate::Error::World(error) => error,
        error => WorldError::Message(error.to_string()),
    }
}
