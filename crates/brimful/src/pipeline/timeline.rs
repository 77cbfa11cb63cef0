//! When each action began and ended: by the clock on a CPU, by events where work is queued.

use std::time::Instant;

use brimful_torch::stream::{Event, Stream};
use tch::Device;

use crate::Result;
use crate::schedule::{Action, Span};

/// The times of one worker's actions, from the step's start on.
#[derive(Debug)]
pub(super) struct Timeline {
    device: Device,
    start: Instant,
    /// The same moment in the device's own queue.
    origin: Mark,
    begun: Option<Mark>,
    spans: Vec<(Action, Mark, Mark)>,
}

/// A moment.
#[derive(Debug)]
enum Mark {
    Host(Instant),
    Device(Event),
}

impl Timeline {
    pub(super) fn new(device: Device, start: Instant, actions: usize) -> Result<Self> {
        let (begun, spans) = (None, Vec::with_capacity(actions));
        Ok(Self { device, start, origin: Mark::now(device)?, begun, spans })
    }

    /// Work begins: all that it needs is there.
    pub(super) fn begin(&mut self) -> Result<()> {
        self.begun = Some(Mark::now(self.device)?);
        Ok(())
    }

    /// Work ends; what follows is waiting for others.
    pub(super) fn end(&mut self, action: Action) -> Result<()> {
        if let Some(begun) = self.begun.take() {
            self.spans.push((action, begun, Mark::now(self.device)?));
        }
        Ok(())
    }

    /// The times in seconds. Waits for the device's last action.
    pub(super) fn read(self) -> Result<Vec<Span>> {
        let since = |mark: &Mark| match (mark, &self.origin) {
            (Mark::Device(event), Mark::Device(origin)) => {
                event.synchronize()?;
                Ok::<_, crate::Error>(origin.elapsed(event)?.as_secs_f64())
            }
            (Mark::Host(at), _) => Ok(at.saturating_duration_since(self.start).as_secs_f64()),
            (Mark::Device(_), Mark::Host(_)) => unreachable!("all marks are of one device"),
        };
        let span = |(action, start, end): &(Action, Mark, Mark)| {
            Ok(Span { action: *action, start: since(start)?, end: since(end)? })
        };
        self.spans.iter().map(span).collect()
    }
}

impl Mark {
    fn now(device: Device) -> Result<Self> {
        if device == Device::Cpu {
            return Ok(Self::Host(Instant::now()));
        }
        let mut event = Event::new(device)?;
        event.record(Stream::current(device)?)?;
        Ok(Self::Device(event))
    }
}
