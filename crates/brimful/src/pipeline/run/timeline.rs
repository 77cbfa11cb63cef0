//! Times each action, by the clock on a CPU and by events on an accelerator, and records the bytes in use in the
//! worker's arena.

use std::time::Instant;

use tch::Device;

use crate::Result;
use crate::memory::{Arena, Memory};
use crate::pipeline::transfers::TransferClock;
use crate::streams::TimedEvent;
use brimful_plan::schedule::{Action, HostLinkUse, Span};

/// Times of one worker's actions since the step's start.
#[derive(Debug)]
pub(crate) struct ActionClock {
    device: Device,
    /// The worker's arena; none on an accelerator, whose memory figures cost time to read.
    arena: Option<Arena>,
    /// The step's start; an event on an accelerator's stream.
    origin: TimedEvent,
    begun: Option<MemoryEvent>,
    spans: Vec<(Action, MemoryEvent, MemoryEvent)>,
}

/// Time of an event, and the bytes in use at that time.
#[derive(Debug)]
struct MemoryEvent {
    at: TimedEvent,
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
            Device::Cpu => TimedEvent::Host(start),
            // An event measures time only from another event, and `start` is a time of the host.
            device => TimedEvent::now(device)?,
        };
        Ok(Self { device, arena, origin, begun: None, spans: Vec::with_capacity(actions) })
    }

    /// Marks the start of an action's work: its inputs are there.
    pub(crate) fn begin(&mut self) -> Result<()> {
        self.begun = Some(self.event()?);
        Ok(())
    }

    /// Marks the end of an action's work, before the worker waits for other workers.
    pub(crate) fn end(&mut self, action: Action) -> Result<()> {
        if let Some(begun) = self.begun.take() {
            let ended = self.event()?;
            self.spans.push((action, begun, ended));
        }
        Ok(())
    }

    fn event(&self) -> Result<MemoryEvent> {
        let bytes = self.arena.as_ref().map_or(0, Arena::current);
        Ok(MemoryEvent { at: TimedEvent::now(self.device)?, bytes })
    }

    /// Returns the times of actions and transfers, in seconds. Waits for the device's last action.
    pub(crate) fn read(self, transfers: TransferClock) -> Result<(Vec<Span>, HostLinkUse)> {
        // All events are on one stream: when the last event is reached, all are.
        if let Some((.., last)) = self.spans.last() {
            last.at.wait()?;
        }
        let since = |event: &MemoryEvent| -> Result<f64> {
            Ok(event.at.since(&self.origin)?.as_secs_f64())
        };
        let span = |(action, begun, ended): &(Action, MemoryEvent, MemoryEvent)| -> Result<Span> {
            let (start, end) = (since(begun)?, since(ended)?);
            Ok(Span { action: *action, start, end, bytes: begun.bytes.max(ended.bytes) })
        };
        let spans = self.spans.iter().map(span).collect::<Result<_>>()?;
        Ok((spans, transfers.read(&self.origin)?))
    }
}
