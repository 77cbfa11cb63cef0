//! When each action began and ended, by the clock on a CPU and by events where work is queued; and
//! what its arena held.

use std::time::Instant;

use tch::Device;

use super::move_clock::MoveClock;
use crate::Result;
use crate::memory::{Arena, Memory};
use crate::moment::Moment;
use crate::schedule::{Action, BusUse, Span};

/// The times of one worker's actions, from the step's start on.
#[derive(Debug)]
pub(crate) struct ActionClock {
    device: Device,
    /// Its account, where reading it costs nothing: an accelerator's is left alone.
    arena: Option<Arena>,
    /// The step's start; in the device's own queue, where it has one.
    origin: Moment,
    begun: Option<TimeMark>,
    spans: Vec<(Action, TimeMark, TimeMark)>,
}

/// A moment, and the bytes in use then.
#[derive(Debug)]
struct TimeMark {
    at: Moment,
    bytes: u64,
}

impl ActionClock {
    pub(crate) fn new(
        device: Device,
        memory: Option<&Memory>,
        start: Instant,
        actions: usize,
    ) -> Result<Self> {
        let arena = match memory {
            Some(Memory::Arena(arena)) => Some(arena.clone()),
            _ => None,
        };
        let origin = match device {
            Device::Cpu => Moment::Host(start),
            // Events tell the time since another event alone: the host's `start` is none.
            device => Moment::now(device)?,
        };
        Ok(Self { device, arena, origin, begun: None, spans: Vec::with_capacity(actions) })
    }

    /// Work begins: all that it needs is there.
    pub(crate) fn begin(&mut self) -> Result<()> {
        self.begun = Some(self.mark()?);
        Ok(())
    }

    /// Work ends; what follows is waiting for others.
    pub(crate) fn end(&mut self, action: Action) -> Result<()> {
        if let Some(begun) = self.begun.take() {
            let ended = self.mark()?;
            self.spans.push((action, begun, ended));
        }
        Ok(())
    }

    fn mark(&self) -> Result<TimeMark> {
        let bytes = self.arena.as_ref().map_or(0, Arena::current);
        Ok(TimeMark { at: Moment::now(self.device)?, bytes })
    }

    /// The times in seconds, and those of what moved. Waits for the device's last action.
    pub(crate) fn read(self, moves: MoveClock) -> Result<(Vec<Span>, BusUse)> {
        // All are in one queue: when the last one has come, so have the others.
        if let Some((.., last)) = self.spans.last() {
            last.at.wait()?;
        }
        let since =
            |mark: &TimeMark| -> Result<f64> { Ok(mark.at.since(&self.origin)?.as_secs_f64()) };
        let span = |(action, begun, ended): &(Action, TimeMark, TimeMark)| -> Result<Span> {
            let (start, end) = (since(begun)?, since(ended)?);
            Ok(Span { action: *action, start, end, bytes: begun.bytes.max(ended.bytes) })
        };
        let spans = self.spans.iter().map(span).collect::<Result<_>>()?;
        Ok((spans, moves.read(&self.origin)?))
    }
}
