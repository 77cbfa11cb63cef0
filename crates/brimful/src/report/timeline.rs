//! A step action by action, in columns of whole numbers.

use serde::{Deserialize, Serialize};

use crate::schedule::{ActionKind, Actions, DeviceUse, Simulation, Span};

/// A step, as it was run or simulated.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TimelineRecord {
    /// What times are in.
    pub unit: Unit,
    /// The length of one count of the lanes' columns, in that unit.
    pub resolution: f64,
    /// From the first action's beginning to the last one's end.
    pub makespan: f64,
    /// Idle time of all devices over all their time.
    pub bubble: f64,
    /// How many stages there are.
    pub stages: usize,
    /// How many micro-batches.
    pub micro_batches: usize,
    /// One for each device.
    pub lanes: Vec<Lane>,
}

/// What times are in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    /// Seconds.
    Seconds,
    /// Whatever the user's own numbers are in.
    Own,
}

/// What one device did, in the order in which it did it: in each column one entry an action.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Lane {
    /// Time at work.
    pub busy: f64,
    /// Time without work, until the last device is done.
    pub idle: f64,
    /// The most bytes that it held; 0 where they are not counted.
    pub peak_bytes: u64,
    /// The [letters](ActionKind::letter) of the kinds.
    pub kinds: String,
    /// The stages; a single entry where all are of one.
    pub stages: Vec<u32>,
    /// The micro-batches.
    pub micro_batches: Vec<u32>,
    /// Counts from the end of the action before, or from the step's beginning, to its own beginning.
    pub waits: Vec<u64>,
    /// Counts from its beginning to its end.
    pub times: Vec<u64>,
    /// The most bytes on the device as it began or ended; empty where they are not counted.
    pub bytes: Vec<u64>,
}

impl TimelineRecord {
    /// A step, simulated or [measured](Simulation::measured).
    #[must_use]
    pub fn new(actions: &Actions, step: &Simulation, unit: Unit) -> Self {
        let resolution = resolution(step.makespan());
        let lanes = step.timeline().iter().zip(step.devices());
        Self {
            unit,
            resolution,
            makespan: step.makespan(),
            bubble: step.bubble(),
            stages: actions.stages(),
            micro_batches: actions.micro_batches(),
            lanes: lanes.map(|(spans, used)| Lane::new(spans, used, resolution)).collect(),
        }
    }

    pub(super) fn check(&self) -> Result<(), String> {
        if !(self.resolution > 0.0 && self.makespan >= 0.0 && self.makespan.is_finite()) {
            return Err(format!("times of {} in counts of {}", self.makespan, self.resolution));
        }
        let device = |(d, lane): (usize, &Lane)| {
            lane.check(self).map_err(|reason| format!("{reason} of device {d}"))
        };
        self.lanes.iter().enumerate().try_for_each(device)
    }
}

/// A power of ten that gives the makespan some nine digits.
fn resolution(makespan: f64) -> f64 {
    const DIGITS: i32 = 9;
    let digits = makespan.log10().ceil();
    if digits.is_finite() { 10_f64.powi(digits as i32 - DIGITS) } else { 1e-9 }
}

impl Lane {
    fn new(spans: &[Span], used: &DeviceUse, resolution: f64) -> Self {
        // From rounded moments, so that the rounding does not add up.
        let count = |time: f64| (time / resolution).round() as u64;
        let before = [0.0].into_iter().chain(spans.iter().map(|span| span.end));
        let waits = spans.iter().zip(before);
        let stages: Vec<u32> = spans.iter().map(|span| span.action.stage.0).collect();
        let is_one = stages.windows(2).all(|pair| pair[0] == pair[1]);
        let is_counted = spans.iter().any(|span| span.bytes > 0);
        let bytes = spans.iter().filter(|_| is_counted).map(|span| span.bytes);
        Self {
            busy: used.busy,
            idle: used.idle,
            peak_bytes: used.peak_bytes,
            kinds: spans.iter().map(|span| span.action.kind.letter()).collect(),
            stages: if is_one { stages.into_iter().take(1).collect() } else { stages },
            micro_batches: spans.iter().map(|span| span.action.micro_batch.0).collect(),
            waits: waits.map(|(span, end)| count(span.start).saturating_sub(count(end))).collect(),
            times: spans.iter().map(|s| count(s.end).saturating_sub(count(s.start))).collect(),
            bytes: bytes.collect(),
        }
    }

    fn check(&self, of: &TimelineRecord) -> Result<(), String> {
        let actions = self.kinds.len();
        let is_kind = |letter: char| ActionKind::ALL.iter().any(|kind| kind.letter() == letter);
        if let Some(letter) = self.kinds.chars().find(|letter| !is_kind(*letter)) {
            return Err(format!("'{letter}' among the actions"));
        }
        let columns = [
            ("stages", self.stages.len(), actions.min(1)),
            ("micro_batches", self.micro_batches.len(), actions),
            ("waits", self.waits.len(), actions),
            ("times", self.times.len(), actions),
            ("bytes", self.bytes.len(), 0),
        ];
        for (name, found, or) in columns {
            if found != actions && found != or {
                return Err(format!("{actions} actions, but {found} entries in '{name}'"));
            }
        }
        let too_large = |ids: &[u32], end: usize| ids.iter().any(|id| *id as usize >= end);
        if too_large(&self.stages, of.stages) || too_large(&self.micro_batches, of.micro_batches) {
            return Err("a stage or micro-batch that the step has not, among the actions".into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{Costs, Recompute, Schedule, StageCost, simulate};

    #[test]
    fn columns_tell_every_action_and_its_times() {
        let actions = Schedule::Interleaved { stages_per_device: 2 }
            .actions(3, 6, Recompute::ExceptLast)
            .expect("a schedule");
        let costs = Costs::equal(6, StageCost::new(0.012_345_678_9, 0.01, 0.003));
        let step = simulate(&actions, &costs).expect("costs");
        let timeline = TimelineRecord::new(&actions, &step, Unit::Seconds);
        assert_eq!(timeline.check(), Ok(()));
        for (lane, spans) in timeline.lanes.iter().zip(step.timeline()) {
            let mut now = 0;
            for (i, span) in spans.iter().enumerate() {
                let action = span.action;
                assert_eq!(lane.kinds.chars().nth(i), Some(action.kind.letter()));
                assert_eq!(lane.stages[i], action.stage.0);
                assert_eq!(lane.micro_batches[i], action.micro_batch.0);
                let start = (now + lane.waits[i]) as f64 * timeline.resolution;
                now += lane.waits[i] + lane.times[i];
                let end = now as f64 * timeline.resolution;
                assert!((start - span.start).abs() < timeline.resolution, "{action}");
                assert!((end - span.end).abs() < timeline.resolution, "{action}");
            }
        }
    }

    #[test]
    fn times_of_any_size_have_some_nine_digits() {
        for (makespan, expected) in [(0.5, 1e-9), (75.5, 1e-7), (1e-12, 1e-21), (0.0, 1e-9)] {
            let ratio = resolution(makespan) / expected;
            assert!((ratio - 1.0).abs() < 1e-9, "{makespan}: {ratio}");
        }
    }
}
