//! Speed of micro-batches of each size, in samples a second: the median of the last few readings. A stopwatch
//! takes one reading.

use std::collections::BTreeMap;
use std::time::Duration;

use tch::Device;

use crate::Result;
use crate::streams::TimedEvent;

/// Number of readings kept of each size: the median of 5 ignores two slow ones, and follows changes.
const READINGS_KEPT: usize = 5;

/// Readings of the rate in samples a second, by size.
#[derive(Debug, Clone, Default)]
pub(crate) struct Rates {
    readings: BTreeMap<usize, Vec<f64>>,
}

impl Rates {
    pub(crate) fn observe(&mut self, size: usize, rate: f64) {
        let readings = self.readings.entry(size).or_default();
        if readings.len() == READINGS_KEPT {
            readings.remove(0);
        }
        readings.push(rate);
    }

    /// Scales the rates of all sizes by this factor.
    pub(crate) fn speed_up(&mut self, factor: f64) {
        self.readings.values_mut().flatten().for_each(|rate| *rate *= factor);
    }

    pub(crate) fn forget_above(&mut self, size: usize) {
        self.readings.retain(|&other, _| other <= size);
    }

    pub(crate) fn count(&self, size: usize) -> usize {
        self.readings.get(&size).map_or(0, Vec::len)
    }

    pub(crate) fn of(&self, size: usize) -> Option<f64> {
        self.readings.get(&size).map(|readings| median(readings))
    }

    /// Returns the fastest size of at most `top`, and its rate.
    pub(crate) fn best(&self, top: usize) -> Option<(usize, f64)> {
        let rates = self.readings.range(..=top).map(|(&size, readings)| (size, median(readings)));
        rates.max_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// Returns the nearest measured sizes below and above.
    pub(crate) fn neighbours(&self, size: usize) -> (Option<usize>, Option<usize>) {
        let below = self.readings.range(..size).next_back().map(|(&size, _)| size);
        (below, self.readings.range(size + 1..).next().map(|(&size, _)| size))
    }

    /// Returns the sizes of at most `top` whose rate is at least `part` of the best.
    pub(crate) fn near_best(&self, top: usize, part: f64) -> impl Iterator<Item = usize> {
        let least = self.best(top).map_or(f64::INFINITY, |(_, rate)| rate * part);
        let near = move |(_, readings): &(&usize, &Vec<f64>)| median(readings) >= least;
        self.readings.range(..=top).filter(near).map(|(&size, _)| size)
    }
}

fn median(readings: &[f64]) -> f64 {
    let mut sorted = readings.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 }
}

/// Events between micro-batches: in the stream of an accelerator, or in the host's time.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_slow_reading_does_not_count() {
        let mut rates = Rates::default();
        for rate in [10.0, 11.0, 2.0, 10.5] {
            rates.observe(8, rate);
        }
        rates.observe(16, 9.0);
        assert_eq!(rates.of(8), Some(10.25));
        assert_eq!(rates.best(100), Some((8, 10.25)));
        assert_eq!(rates.best(7), None);
        assert_eq!(rates.near_best(100, 0.85).collect::<Vec<_>>(), [8, 16]);
        assert_eq!(rates.near_best(100, 0.9).collect::<Vec<_>>(), [8]);
    }

    #[test]
    fn old_readings_are_forgotten() {
        let mut rates = Rates::default();
        (0..READINGS_KEPT).for_each(|_| rates.observe(4, 1.0));
        (0..READINGS_KEPT).for_each(|_| rates.observe(4, 3.0));
        assert_eq!((rates.of(4), rates.count(4)), (Some(3.0), READINGS_KEPT));
    }
}
