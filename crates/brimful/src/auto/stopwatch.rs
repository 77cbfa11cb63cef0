//! Times a row of micro-batches without making the device wait between them.

use std::time::{Duration, Instant};

use brimful_torch::stream::{Event, Stream};
use tch::Device;

use crate::Result;

/// Marks between micro-batches: in the device's queue where it has one.
#[derive(Debug)]
pub(crate) struct Stopwatch {
    device: Device,
    start: Mark,
    /// The end of each micro-batch, and whether others will take as long.
    laps: Vec<(Mark, bool)>,
}

#[derive(Debug)]
enum Mark {
    Host(Instant),
    Queue(Event),
}

impl Stopwatch {
    pub(crate) fn start(device: Device) -> Result<Self> {
        Ok(Self { device, start: Mark::now(device)?, laps: Vec::new() })
    }

    /// The work since the last mark was one micro-batch: one to go by, or not.
    pub(crate) fn lap(&mut self, typical: bool) -> Result<()> {
        self.laps.push((Mark::now(self.device)?, typical));
        Ok(())
    }

    /// The time of a typical micro-batch: the median of those, without the first of all, which warms
    /// up, unless there is no other. Waits for the device.
    pub(crate) fn read(&self) -> Result<Option<Duration>> {
        if let Some((Mark::Queue(last), _)) = self.laps.last() {
            last.synchronize()?;
        }
        let starts = [&self.start].into_iter().chain(self.laps.iter().map(|(mark, _)| mark));
        let laps = starts.zip(&self.laps).skip(usize::from(self.laps.len() > 1));
        let typical = laps.filter(|(_, (_, typical))| *typical);
        let times = typical.map(|(start, (end, _))| between(start, end));
        let mut times = times.collect::<Result<Vec<_>>>()?;
        times.sort();
        Ok(times.get(times.len() / 2).copied())
    }
}

impl Mark {
    fn now(device: Device) -> Result<Self> {
        if device == Device::Cpu {
            return Ok(Self::Host(Instant::now()));
        }
        let mut event = Event::new(device)?;
        event.record(Stream::current(device)?)?;
        Ok(Self::Queue(event))
    }
}

fn between(earlier: &Mark, later: &Mark) -> Result<Duration> {
    match (earlier, later) {
        (Mark::Host(earlier), Mark::Host(later)) => Ok(later.duration_since(*earlier)),
        (Mark::Queue(earlier), Mark::Queue(later)) => Ok(earlier.elapsed(later)?),
        _ => unreachable!("a stopwatch's marks are of one device"),
    }
}
