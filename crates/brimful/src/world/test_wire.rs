//! In-process wire between ranks, for tests: messages are matched as by MPI, with as few tags as a test
//! wants.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

use tch::Tensor;

use super::error::WorldError;
use super::wire::{Ticket, Wire};

/// Sender, receiver and tag: messages that share all three are matched in order.
type Key = (usize, usize, u64);

/// Messages between the ranks.
#[derive(Debug, Default)]
struct Air {
    reported: HashMap<(usize, usize), Vec<Vec<u8>>>,
    heard: HashMap<(usize, usize), usize>,
    sent: HashMap<Key, Vec<Tensor>>,
    asked: HashMap<Key, usize>,
    /// Whether the data of tensors get lost.
    loses_numbers: bool,
    ended: Option<ThreadId>,
}

/// End of the wire at one rank.
#[derive(Debug)]
pub(super) struct TestWire {
    rank: usize,
    size: usize,
    tags: u64,
    air: Arc<Mutex<Air>>,
    next: Ticket,
    asked: HashMap<Ticket, (Key, usize, Tensor)>,
}

/// Access of a test to the wires.
#[derive(Debug, Clone)]
pub(super) struct Observer(Arc<Mutex<Air>>);

/// Creates an end for each rank, with this many tags.
pub(super) fn wires(size: usize, tags: u64) -> (Vec<Box<dyn Wire>>, Observer) {
    let air: Arc<Mutex<Air>> = Arc::default();
    let wire =
        |rank| TestWire { rank, size, tags, air: Arc::clone(&air), next: 0, asked: HashMap::new() };
    let wires = (0..size).map(|rank| Box::new(wire(rank)) as Box<dyn Wire>).collect();
    (wires, Observer(air))
}

impl Observer {
    /// Makes the data of announced tensors never arrive from now on.
    pub(super) fn lose_numbers(&self) {
        self.0.lock().expect("not poisoned").loses_numbers = true;
    }

    /// Returns the thread that has ended a wire in order.
    pub(super) fn ended_by(&self) -> Option<ThreadId> {
        self.0.lock().expect("not poisoned").ended
    }
}

impl Wire for TestWire {
    fn place(&self) -> (usize, usize) {
        (self.rank, self.size)
    }

    fn host(&self) -> String {
        "a test".into()
    }

    fn tell(&mut self, to: usize, bytes: Vec<u8>) -> Result<Ticket, WorldError> {
        let mut air = self.air.lock().expect("not poisoned");
        air.reported.entry((self.rank, to)).or_default().push(bytes);
        Ok(0)
    }

    fn told(&mut self) -> Result<Option<(usize, Vec<u8>)>, WorldError> {
        let mut air = self.air.lock().expect("not poisoned");
        for from in 0..self.size {
            let way = (from, self.rank);
            let heard = air.heard.get(&way).copied().unwrap_or_default();
            if let Some(bytes) =
                air.reported.get(&way).and_then(|reported| reported.get(heard)).cloned()
            {
                air.heard.insert(way, heard + 1);
                return Ok(Some((from, bytes)));
            }
        }
        Ok(None)
    }

    fn tags(&self) -> u64 {
        self.tags
    }

    fn send(&mut self, tensor: Tensor, to: usize, number: u64) -> Result<Ticket, WorldError> {
        let mut air = self.air.lock().expect("not poisoned");
        if !air.loses_numbers {
            let key = (self.rank, to, number % self.tags);
            air.sent.entry(key).or_default().push(tensor.copy());
        }
        Ok(0)
    }

    fn receive(&mut self, tensor: Tensor, from: usize, number: u64) -> Result<Ticket, WorldError> {
        let key = (from, self.rank, number % self.tags);
        let mut air = self.air.lock().expect("not poisoned");
        let asked = air.asked.entry(key).or_default();
        self.next += 1;
        self.asked.insert(self.next, (key, *asked, tensor));
        *asked += 1;
        Ok(self.next)
    }

    fn is_done(&mut self, ticket: Ticket) -> Result<bool, WorldError> {
        let Some((key, place, tensor)) = self.asked.get(&ticket) else { return Ok(true) };
        let air = self.air.lock().expect("not poisoned");
        let Some(sent) = air.sent.get(key).and_then(|sent| sent.get(*place)) else {
            return Ok(false);
        };
        if sent.numel() > tensor.numel() {
            return Err(WorldError::Message("MPI_ERR_TRUNCATE: message truncated".into()));
        }
        tensor.view([-1]).narrow(0, 0, sent.numel() as i64).copy_(&sent.view([-1]));
        self.asked.remove(&ticket);
        Ok(true)
    }

    fn end(self: Box<Self>) {
        self.air.lock().expect("not poisoned").ended = Some(thread::current().id());
    }
}
