//! Results of the steps, in columns whose length is bounded however long the run is.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Record;
use brimful_plan::bytes::Bytes;

/// Largest number of points; beyond it, neighbours are joined in pairs.
const POINTS: usize = 4096;

/// Results of the steps. Each column has one entry for each point, which is one step or, in a long run,
/// several neighbouring steps.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Steps {
    /// Number of steps in a point; the last one may have fewer.
    pub every: usize,
    /// Number of the point's last step, counted from 1.
    pub number: Vec<usize>,
    /// Seconds from the run's start to the point's end.
    pub seconds: Vec<f64>,
    /// Mean loss; `None` if it is non-finite.
    pub loss: Vec<Option<f64>>,
    /// Speed in samples per second.
    pub samples_per_s: Vec<f64>,
    /// Size of the largest micro-batch.
    pub micro_batch: Vec<usize>,
    /// Number of retries after running out of memory.
    pub retries: Vec<usize>,
    /// Peak bytes in use on each device, where they are counted.
    pub peaks: Vec<Vec<Option<Bytes>>>,
}

impl Steps {
    pub(super) fn check(&self, devices: usize) -> Result<(), String> {
        let points = self.number.len();
        let columns = [
            ("seconds", self.seconds.len()),
            ("loss", self.loss.len()),
            ("samples_per_s", self.samples_per_s.len()),
            ("micro_batch", self.micro_batch.len()),
            ("retries", self.retries.len()),
        ];
        let peaks = self.peaks.iter().map(|column| ("peaks", column.len()));
        if let Some((name, found)) = columns.into_iter().chain(peaks).find(|(_, n)| *n != points) {
            return Err(format!("{points} steps, but {found} entries in '{name}'"));
        }
        match self.peaks.len() {
            found if found == devices || points == 0 => Ok(()),
            found => Err(format!("peaks of {found} devices, but there are {devices}")),
        }
    }
}

/// Results of the steps so far.
#[derive(Debug, Default)]
pub(super) struct History {
    points: Vec<Point>,
    /// Steps in a point: see [`Steps::every`]; a power of two.
    every: usize,
    /// Number of steps so far.
    pub(super) steps: usize,
}

/// Neighbouring steps that are joined.
#[derive(Debug, Clone)]
struct Point {
    steps: usize,
    number: usize,
    seconds: f64,
    /// Sum over the steps.
    loss: f64,
    samples: usize,
    time: Duration,
    micro_batch: usize,
    retries: usize,
    peaks: Vec<Option<Bytes>>,
}

impl History {
    /// Adds a step that ended `seconds` after the start.
    pub(super) fn add(&mut self, step: &Record, seconds: f64) {
        self.steps += 1;
        self.every = self.every.max(1);
        let point = Point {
            steps: 1,
            number: self.steps,
            seconds,
            loss: step.loss,
            samples: step.samples,
            time: step.time,
            micro_batch: step.micro_batch,
            retries: step.retries,
            peaks: step.peaks.clone(),
        };
        self.put(point);
        if self.points.len() > POINTS {
            self.every *= 2;
            std::mem::take(&mut self.points).into_iter().for_each(|point| self.put(point));
        }
    }

    /// Joins the point with the last one if that has fewer than `every` steps; otherwise appends it.
    fn put(&mut self, point: Point) {
        match self.points.last_mut() {
            Some(last) if last.steps < self.every => last.join(point),
            _ => self.points.push(point),
        }
    }

    pub(super) fn columns(&self, devices: usize) -> Steps {
        let points = &self.points;
        let peaks = |device: usize| {
            points.iter().map(|point| point.peaks.get(device).copied().flatten()).collect()
        };
        Steps {
            every: self.every,
            number: points.iter().map(|point| point.number).collect(),
            seconds: points.iter().map(|point| point.seconds).collect(),
            loss: points.iter().map(Point::mean_loss).collect(),
            samples_per_s: points.iter().map(Point::rate).collect(),
            micro_batch: points.iter().map(|point| point.micro_batch).collect(),
            retries: points.iter().map(|point| point.retries).collect(),
            peaks: (0..devices).map(peaks).collect(),
        }
    }
}

impl Point {
    fn join(&mut self, later: Self) {
        self.steps += later.steps;
        self.number = later.number;
        self.seconds = later.seconds;
        self.loss += later.loss;
        self.samples += later.samples;
        self.time += later.time;
        self.micro_batch = self.micro_batch.max(later.micro_batch);
        self.retries += later.retries;
        for (peak, other) in self.peaks.iter_mut().zip(later.peaks) {
            *peak = (*peak).max(other);
        }
    }

    fn mean_loss(&self) -> Option<f64> {
        let mean = self.loss / self.steps as f64;
        mean.is_finite().then_some(mean)
    }

    fn rate(&self) -> f64 {
        self.samples as f64 / self.time.as_secs_f64().max(1e-9)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_run_stays_short_and_loses_no_sample() {
        let mut history = History::default();
        let steps = 3 * POINTS + 1;
        for number in 0..steps {
            let step = Record {
                loss: number as f64,
                samples: 2,
                time: Duration::from_secs(1),
                peaks: vec![Some(Bytes(number as u64))],
                ..Record::default()
            };
            history.add(&step, number as f64);
        }
        let columns = history.columns(1);
        assert_eq!(columns.check(1), Ok(()));
        assert_eq!((columns.every, columns.number.len()), (4, steps.div_ceil(4)));
        assert_eq!(columns.loss[..2], [Some(1.5), Some(5.5)]);
        assert!(columns.samples_per_s.iter().all(|rate| *rate == 2.0));
        assert_eq!(columns.peaks[0][1], Some(Bytes(7)));
        assert_eq!(columns.number.last(), Some(&steps));
    }
}
