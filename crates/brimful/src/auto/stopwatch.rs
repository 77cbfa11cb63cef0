//! Times a series of micro-batches without making the device wait between them.

use std::time::Duration;

use tch::Device;

use crate::Result;
use crate::streams::TimedEvent;

/// Events between micro-batches, in the device's queue where it has one.
#[derive(Debug)]
pub(crate) struct Stopwatch {
    device: Device,
    start: TimedEvent,
    /// End of each micro-batch, and whether others will take as long.
    laps: Vec<(TimedEvent, bool)>,
}

impl Stopwatch {
    pub(crate) fn start(device: Device) -> Result<Self> {
        Ok(Self { device, start: TimedEvent::now(device)?, laps: Vec::new() })
    }

    /// Records the end of a micro-batch; `typical` says whether others will take as long.
    pub(crate) fn lap(&mut self, typical: bool) -> Result<()> {
        self.laps.push((TimedEvent::now(self.device)?, typical));
        Ok(())
    }

    /// Returns the median time of the typical micro-batches. Leaves out the first one, which warms up,
    /// unless there is no other. Waits for the device.
    pub(crate) fn read(&self) -> Result<Option<Duration>> {
        // Work is done in order, so the last event comes after all others: one wait is enough.
        if let Some((last, _)) = self.laps.last() {
            last.wait()?;
        }
        let starts = [&self.start].into_iter().chain(self.laps.iter().map(|(end, _)| end));
        let laps = starts.zip(&self.laps).skip(usize::from(self.laps.len() > 1));
        let typical = laps.filter(|(_, (_, typical))| *typical);
        let times = typical.map(|(start, (end, _))| end.since(start));
        let mut times = times.collect::<Result<Vec<_>>>()?;
        times.sort();
        Ok(times.get(times.len() / 2).copied())
    }
}
