//! Times a row of micro-batches without making the device wait between them.

use std::time::{Duration, Instant};

use brimful_torch::stream::{Event, Stream};
use tch::Device;

use crate::Result;

/// Marks between micro-batches: in the device's queue where it has one.
#[derive(Debug)]
pub(crate) struct Stopwatch {
    device: Device,
    /// Micro-batches, besides the first, that do not count.
    warm_up: usize,
    marks: Vec<Mark>,
}

#[derive(Debug)]
enum Mark {
    Host(Instant),
    Queue(Event),
}

impl Stopwatch {
    pub(crate) fn start(device: Device, warm_up: usize) -> Result<Self> {
        let mut stopwatch = Self { device, warm_up, marks: Vec::new() };
        stopwatch.lap()?;
        Ok(stopwatch)
    }

    /// The work since the last mark was one micro-batch.
    pub(crate) fn lap(&mut self) -> Result<()> {
        self.marks.push(match self.device {
            Device::Cpu => Mark::Host(Instant::now()),
            device => {
                let mut event = Event::new(device)?;
                event.record(Stream::current(device)?)?;
                Mark::Queue(event)
            }
        });
        Ok(())
    }

    /// The typical time of a micro-batch: the median of all but the first ones, which warm up. Waits
    /// for the device.
    pub(crate) fn read(&self) -> Result<Option<Duration>> {
        if let Some(Mark::Queue(last)) = self.marks.last() {
            last.synchronize()?;
        }
        let laps = self.marks.windows(2).map(|pair| between(&pair[0], &pair[1]));
        let mut laps = laps.collect::<Result<Vec<_>>>()?;
        laps.drain(..(1 + self.warm_up).min(laps.len().saturating_sub(1)));
        laps.sort();
        Ok(laps.get(laps.len() / 2).copied())
    }
}

fn between(earlier: &Mark, later: &Mark) -> Result<Duration> {
    match (earlier, later) {
        (Mark::Host(earlier), Mark::Host(later)) => Ok(later.duration_since(*earlier)),
        (Mark::Queue(earlier), Mark::Queue(later)) => Ok(earlier.elapsed(later)?),
        _ => unreachable!("a stopwatch's marks are of one device"),
    }
}
