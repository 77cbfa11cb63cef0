//! Collectives and their channels: transfers between ranks, and sums over ranks.

use super::Messenger;
use crate::Result;
use crate::world::error::WorldError;
use crate::world::inbox::Inbox;
use crate::world::message::{Channel, Message, encode};
use crate::world::outbox::{Outbox, OutgoingMessage};
use crate::world::ring::Ring;
use crate::world::waits::Wait;
use crate::world::wire::Ticket;

impl Messenger {
    /// Begins a collective and returns its number. All ranks begin the same collectives in the same order.
    pub(in crate::world) fn begin(&mut self) -> u64 {
        self.collectives += 1;
        self.open.insert(self.collectives);
        self.collectives
    }

    /// Returns whether a collective has begun and ended here.
    pub(super) fn is_over(&self, collective: u64) -> bool {
        collective <= self.collectives && !self.open.contains(&collective)
    }

    /// Returns whether devices of this rank still compute data that other ranks need in a collective.
    pub(in crate::world) fn is_computing_for(&self, collective: u64) -> bool {
        let mut of_turn =
            self.outboxes.iter().filter(|((_, channel), _)| channel.collective == collective);
        !self.is_stopped(collective) && of_turn.any(|(_, outbox)| outbox.is_waiting())
    }

    /// Ends a collective: pending data are dropped.
    pub(in crate::world) fn close(&mut self, collective: u64) {
        self.open.remove(&collective);
        self.stopped.remove(&collective);
        // A failed collective may have left sums half-way; the next one must not find them.
        self.rings.retain(|channel, _| channel.collective != collective);
        let over = self.inboxes.extract_if(.., |(_, channel), _| channel.collective == collective);
        for ((from, _), inbox) in over {
            match inbox.discard(&mut *self.wire, from) {
                Ok(tickets) => self.forgotten.extend(tickets),
                Err(error) => drop(self.broken.get_or_insert(error)),
            }
        }
        let over = self.outboxes.extract_if(.., |(_, channel), _| channel.collective == collective);
        self.forgotten.extend(over.flat_map(|(_, outbox)| outbox.into_tickets()));
    }

    /// Reports to all ranks that a collective has failed here.
    pub(in crate::world) fn stop(&mut self, collective: u64) {
        // Reported only once, because every rank that receives the report stops too, and would report to all
        // others again.
        if self.stopped.insert(collective) {
            self.tell_all(&Message::Stop { collective });
        }
    }

    pub(in crate::world) fn is_stopped(&self, collective: u64) -> bool {
        self.stopped.contains(&collective)
    }

    /// Sends tensors as soon as their device has copied them to host memory.
    pub(in crate::world) fn send(
        &mut self,
        to: usize,
        channel: Channel,
        message: OutgoingMessage,
    ) -> Result<()> {
        self.outboxes.entry((to, channel)).or_default().put(message);
        self.send_ready((to, channel))
    }

    /// Sends the transfers of a channel that are ready.
    fn send_ready(&mut self, key: (usize, Channel)) -> Result<()> {
        while let Some(message) = self.outboxes.entry(key).or_default().next()? {
            let tickets = self.set_out(key, message)?;
            self.outboxes.entry(key).or_default().sent(tickets);
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

    /// Announces tensors and sends them. Announcements and data go in the same order, which is how the
    /// receiver matches them.
    fn set_out(
        &mut self,
        (to, channel): (usize, Channel),
        message: OutgoingMessage,
    ) -> Result<Vec<Ticket>, WorldError> {
        let OutgoingMessage { outline, tensors, .. } = message;
        // Numbered when it is sent, not when it was packed: transfers of other channels may overtake a transfer
        // that waits for its device.
        let first = self.sent[to];
        self.sent[to] += tensors.len() as u64;
        let announced = encode(&Message::Tensors { channel, first, outline })?;
        let announced = self.wire.tell(to, announced)?;
        self.forgotten.push(announced);
        let mut tickets = Vec::new();
        for (tensor, number) in tensors.into_iter().zip(first..) {
            self.traffic.count(&tensor);
            tickets.push(self.wire.send(tensor, to, number)?);
        }
        Ok(tickets)
    }

    /// Makes sure that `count` new tensors of a rank, from number `first` on, cannot be mistaken for
    /// earlier ones: posts the receives of all announced tensors with the same tags now.
    pub(super) fn tell_apart(
        &mut self,
        from: usize,
        first: u64,
        count: u64,
    ) -> Result<(), WorldError> {
        // Tensors whose numbers differ by a multiple of the number of tags (at least 32,768) have the same
        // MPI tag.
        let before = (first + count).saturating_sub(self.wire.tags());
        if before <= self.oldest[from] {
            return Ok(());
        }
        let mut oldest = first;
        for ((sender, _), inbox) in &mut self.inboxes {
            if *sender == from {
                inbox.ask_ahead(&mut *self.wire, from, before)?;
                oldest = oldest.min(inbox.oldest().unwrap_or(first));
            }
        }
        self.oldest[from] = oldest;
        Ok(())
    }

    /// Returns the number of transfers of a channel that are not completely sent.
    pub(in crate::world) fn outstanding(&self, to: usize, channel: Channel) -> usize {
        self.outboxes.get(&(to, channel)).map_or(0, Outbox::len)
    }

    /// Returns whether this rank's own device still computes the next transfer of a channel.
    pub(in crate::world) fn is_computing(&self, to: usize, channel: Channel) -> bool {
        self.outboxes.get(&(to, channel)).is_some_and(Outbox::is_waiting)
    }

    /// Returns whether devices still copy data to host memory from which they are sent.
    pub(in crate::world) fn expects_a_device(&self) -> bool {
        self.outboxes.values().any(Outbox::is_waiting) || self.rings.values().any(Ring::is_waiting)
    }

    pub(in crate::world) fn inbox(&mut self, from: usize, channel: Channel) -> &mut Inbox {
        self.inboxes.entry((from, channel)).or_default()
    }

    pub(super) fn advance_rings(&mut self) -> Result<(), WorldError> {
        let channels: Vec<Channel> = self.rings.keys().copied().collect();
        for channel in channels {
            // Taken out, because the ring sends and receives through the messenger that owns it.
            let Some(mut ring) = self.rings.remove(&channel) else { continue };
            let advanced = self.advance_ring(&mut ring, channel);
            self.rings.insert(channel, ring);
            advanced.map_err(message_of)?;
        }
        Ok(())
    }

    /// Advances a sum as far as the received parts allow.
    fn advance_ring(&mut self, ring: &mut Ring, channel: Channel) -> Result<()> {
        if !ring.is_ready()? {
            return Ok(());
        }
        let (before, after) = (ring.before(), ring.after());
        while !ring.is_done() {
            if let Some((into, sent)) = ring.begin_step()? {
                // Received straight into place: a copy of every gradient at every step would cost time.
                let inbox = self.inbox(before, channel);
                inbox.open(1, None);
                inbox.take_into(into);
                let part = OutgoingMessage::pack(&vec![vec![Some(sent)]], None)?;
                self.send(after, channel, part)?;
            }
            // The part being sent must not change.
            if self.outstanding(after, channel) > 0 {
                return Ok(());
            }
            let Some(came) = self.inbox(before, channel).take() else { return Ok(()) };
            came?;
            ring.end_step()?;
        }
        Ok(())
    }

    /// Returns the cause of a sum's wait: its own device, the rank that sends the next part, or the rank to which
    /// this rank still sends a part.
    pub(in crate::world) fn ring_waits_for(&mut self, channel: Channel) -> Wait {
        let ring = self.rings.get(&channel).filter(|ring| !ring.is_waiting());
        let Some((before, after)) = ring.map(|ring| (ring.before(), ring.after())) else {
            return Wait::Nobody;
        };
        match self.inbox(before, channel).is_there() {
            true => Wait::Message(after),
            false => self.inbox(before, channel).waits_for(before),
        }
    }

    pub(in crate::world) fn take_ring(&mut self, channel: Channel) -> Option<Ring> {
        self.rings.get(&channel).filter(|ring| ring.is_done())?;
        self.rings.remove(&channel)
    }
}

fn message_of(error: crate::Error) -> WorldError {
    match error {
        crate::Error::World(error) => error,
        error => WorldError::Message(error.to_string()),
    }
}
