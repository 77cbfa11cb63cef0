//! Messages between this rank and the other ranks, and the progress of all messages.
//!
//! One lock guards the messenger. A waiting thread makes progress on all messages while it waits; the pump also
//! does so at intervals, because other threads compute.

mod channels;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use super::error::WorldError;
use super::inbox::{self, Inbox};
use super::message::{self, Channel, Message};
use super::outbox::Outbox;
use super::pulse::Pulse;
use super::ring::Ring;
use super::traffic::Traffic;
use super::waits::{Wait, Waits};
use super::wire::{Ticket, Wire};
use crate::Result;

/// Value of another rank in an exchange of values.
#[derive(Debug)]
pub(super) struct Value {
    pub(super) number: u64,
    pub(super) what: String,
    pub(super) bytes: Vec<u8>,
}

/// State of this rank's messages.
#[derive(Debug)]
pub(super) struct Messenger {
    wire: Box<dyn Wire>,
    pub(super) rank: usize,
    pub(super) size: usize,
    pub(super) hosts: Vec<String>,
    pub(super) traffic: Traffic,
    pub(super) pulse: Pulse,
    pub(super) waits: Waits,
    /// Values received, by rank and in order.
    pub(super) values: Vec<VecDeque<Value>>,
    /// Number of exchanges of values so far.
    pub(super) moments: u64,
    /// Sorted by rank and channel, like all collections that are iterated.
    inboxes: BTreeMap<(usize, Channel), Inbox>,
    outboxes: BTreeMap<(usize, Channel), Outbox>,
    /// Messages that only need to complete.
    forgotten: Vec<Ticket>,
    pub(super) rings: BTreeMap<Channel, Ring>,
    /// Number of tensors sent to each rank.
    sent: Vec<u64>,
    /// For each rank, the number of the first announced tensor that may lack a posted receive.
    oldest: Vec<u64>,
    collectives: u64,
    open: BTreeSet<u64>,
    stopped: BTreeSet<u64>,
    /// Ranks that have ended, with the reason that they sent.
    left: Vec<Option<Option<String>>>,
    /// Error of ranks that make different calls.
    confused: Option<WorldError>,
    /// Error of lost or unreachable ranks, after which MPI is not ended in order.
    broken: Option<WorldError>,
}

impl Messenger {
    pub(super) fn new(wire: Box<dyn Wire>, heartbeat_timeout: Duration, timeout: Duration) -> Self {
        let (rank, size) = wire.place();
        Self {
            rank,
            size,
            hosts: (0..size).map(|_| wire.host()).collect(),
            traffic: Traffic::default(),
            pulse: Pulse::new(size, heartbeat_timeout, Instant::now()),
            waits: Waits::new(rank, size, timeout),
            values: (0..size).map(|_| VecDeque::new()).collect(),
            moments: 0,
            inboxes: BTreeMap::new(),
            outboxes: BTreeMap::new(),
            forgotten: Vec::new(),
            rings: BTreeMap::new(),
            sent: vec![0; size],
            oldest: vec![0; size],
            collectives: 0,
            open: BTreeSet::new(),
            stopped: BTreeSet::new(),
            left: vec![None; size],
            confused: None,
            broken: None,
            wire,
        }
    }

    /// Makes progress on all messages. An error breaks the world.
    pub(super) fn progress(&mut self) {
        if self.broken.is_none()
            && let Err(error) = self.try_progress()
        {
            self.broken = Some(error);
        }
    }

    fn try_progress(&mut self) -> Result<(), WorldError> {
        // Messages first: they announce the tensors that inboxes receive below.
        while let Some((from, bytes)) = self.wire.told()? {
            self.pulse.heard(from, Instant::now());
            self.dispatch(from, message::decode(&bytes)?)?;
        }
        for ((from, _), inbox) in &mut self.inboxes {
            inbox.advance(&mut *self.wire, *from)?;
        }
        self.advance_outboxes()?;
        let mut left = Vec::new();
        for ticket in self.forgotten.drain(..) {
            if !self.wire.is_done(ticket)? {
                left.push(ticket);
            }
        }
        self.forgotten = left;
        self.advance_rings()
    }

    fn dispatch(&mut self, from: usize, message: Message) -> Result<(), WorldError> {
        match message {
            Message::Beat { waits_for } => self.waits.heard(from, waits_for),
            Message::Value { number, what, bytes } => {
                self.values[from].push_back(Value { number, what, bytes });
            }
            Message::Tensors { channel, first, outline } => {
                self.tell_apart(from, first, outline.count())?;
                // Received although the collective is over, because MPI keeps a send, and the sender's memory,
                // until the send is received.
                if self.is_over(channel.collective) {
                    let tickets = inbox::discarded(&mut *self.wire, from, first, &outline)?;
                    self.forgotten.extend(tickets);
                } else {
                    self.inboxes.entry((from, channel)).or_default().announce(first, outline);
                }
            }
            Message::Stop { collective } => {
                if !self.is_over(collective) {
                    self.stopped.insert(collective);
                }
            }
            Message::Lost { rank, .. } if rank == self.rank => {
                return Err(WorldError::GivenUp { rank });
            }
            Message::Lost { rank, silent } => {
                return Err(self.lost(rank, Duration::from_millis(silent)));
            }
            Message::Hangs { rank, waited } => {
                return Err(self.hangs(rank, Duration::from_millis(waited)));
            }
            Message::Left { words } => self.left[from] = Some(words),
        }
        Ok(())
    }

    /// Sends a heartbeat when it is due, and declares ranks lost that were silent for too long.
    pub(super) fn watch(&mut self, now: Instant) {
        if self.broken.is_some() {
            return;
        }
        if self.pulse.is_due(now) {
            self.tell_all(&Message::Beat { waits_for: self.waits.own() });
        }
        let me = self.rank;
        let left = &self.left;
        if let Some((rank, silent)) = self.pulse.lost(now, |r| r != me && left[r].is_none()) {
            // Sent to all ranks, so that all name the lost one. Otherwise this rank, which now stops its
            // heartbeat, would itself be blamed some seconds later.
            let millis = silent.as_millis() as u64;
            self.tell_all(&Message::Lost { rank, silent: millis });
            self.broken = Some(self.lost(rank, silent));
        }
    }

    fn lost(&self, rank: usize, silent: Duration) -> WorldError {
        WorldError::RankLost { rank, host: self.hosts[rank].clone(), silent }
    }

    /// Records that this thread waits; fails if the awaited rank is gone or hangs.
    pub(super) fn wait_for(&mut self, wait: Wait) -> Result<(), WorldError> {
        self.check(wait)?;
        let (Wait::Rank(rank) | Wait::Message(rank)) = wait else { return Ok(()) };
        // The pump of a hanging rank still sends heartbeats: only the length of a wait shows that it hangs.
        let Some((rank, waited)) = self.waits.waiting(rank, Instant::now()) else { return Ok(()) };
        self.tell_all(&Message::Hangs { rank, waited: waited.as_millis() as u64 });
        let error = self.hangs(rank, waited);
        Err(self.broken.get_or_insert(error).clone())
    }

    fn hangs(&self, rank: usize, waited: Duration) -> WorldError {
        WorldError::RankHangs { rank, host: self.hosts[rank].clone(), waited }
    }

    /// Sends a small message to all other ranks, including those that have ended and wait for the rest.
    pub(super) fn tell_all(&mut self, message: &Message) {
        let reported = message::encode(message).and_then(|bytes| {
            for to in (0..self.size).filter(|to| *to != self.rank) {
                let ticket = self.wire.tell(to, bytes.clone())?;
                self.forgotten.push(ticket);
            }
            Ok(())
        });
        if let Err(error) = reported {
            self.broken.get_or_insert(error);
        }
    }

    /// Fails if there is a reason not to wait.
    fn check(&self, wait: Wait) -> Result<(), WorldError> {
        if let Some(error) = self.broken.as_ref().or(self.confused.as_ref()) {
            return Err(error.clone());
        }
        // A message in flight arrives even if its sender has ended since.
        let Wait::Rank(rank) = wait else { return Ok(()) };
        let Some(words) = self.left[rank].clone() else { return Ok(()) };
        Err(WorldError::RankLeft { rank, host: self.hosts[rank].clone(), words })
    }

    /// Records that ranks make different calls: later messages would not match.
    pub(super) fn confuse(&mut self, error: WorldError) -> WorldError {
        self.confused.get_or_insert(error).clone()
    }

    /// Returns whether every other rank has ended.
    pub(super) fn all_left(&self) -> bool {
        self.left.iter().enumerate().all(|(rank, left)| rank == self.rank || left.is_some())
    }

    pub(super) fn is_broken(&self) -> bool {
        self.broken.is_some()
    }

    /// Returns whether a collective is open or a message is pending.
    pub(super) fn is_busy(&self) -> bool {
        !self.open.is_empty() || !self.forgotten.is_empty()
    }

    /// Returns the wire, to be ended in order or dropped.
    pub(super) fn into_wire(self) -> Box<dyn Wire> {
        self.wire
    }
}
