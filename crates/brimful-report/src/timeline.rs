//! Timelines of steps, as columns of integers.

use serde::{Deserialize, Serialize};

use brimful_plan::schedule::{
    ActionKind, Actions, Awaited, DeviceUse, HostLinkUse, Simulation, Span, TransferKind,
    TransferSpan, WaitSpan,
};

/// Timeline of a step, measured or simulated.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TimelineRecord {
    /// Unit of times.
    pub unit: Unit,
    /// Length of one count in the lanes' columns, in `unit`.
    pub resolution: f64,
    /// Time from the first start to the last end, of actions and transfers.
    pub makespan: f64,
    /// Idle time of all devices as a share of their total time.
    pub bubble: f64,
    /// Number of stages.
    pub stages: usize,
    /// Number of micro-batches.
    pub micro_batches: usize,
    /// One lane for each device.
    pub lanes: Vec<Lane>,
}

/// Unit of times.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    /// Seconds.
    Seconds,
    /// Unit of the user's own numbers.
    Own,
}

/// Actions of one device, in the order of execution: each column has one entry for each action.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Lane {
    /// Time during which the device computes.
    pub busy: f64,
    /// Idle time until the last device is done.
    pub idle: f64,
    /// Peak bytes in use; 0 where they are not counted.
    pub peak_bytes: u64,
    /// [Letters](ActionKind::letter) of the action kinds.
    pub kinds: String,
    /// Stages; a single entry where all actions belong to one stage.
    pub stages: Vec<u32>,
    /// Micro-batches.
    pub micro_batches: Vec<u32>,
    /// Counts from the end of the previous action, or from the step's start, to the action's start.
    pub waits: Vec<u64>,
    /// Counts from start to end.
    pub times: Vec<u64>,
    /// Largest number of bytes on the device at the action's start or end; empty where they are not
    /// counted.
    pub bytes: Vec<u64>,
    /// Transfers from the host.
    #[serde(default, skip_serializing_if = "is_unused")]
    pub inward: HostLinkLane,
    /// Transfers to the host.
    #[serde(default, skip_serializing_if = "is_unused")]
    pub outward: HostLinkLane,
    /// Waits of compute for transfers.
    #[serde(default, skip_serializing_if = "is_unused")]
    pub awaited: WaitLane,
}

/// Transfers of a device in one direction, in order: each column has one entry for each transfer.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HostLinkLane {
    /// [Letters](TransferKind::letter) of the transfer kinds.
    pub kinds: String,
    /// Stages of weights, gradients and boundaries.
    pub stages: Vec<u32>,
    /// Micro-batches of boundaries.
    pub micro_batches: Vec<Option<u32>>,
    /// Counts from the end of the previous transfer, or from the step's start, to the transfer's start.
    pub waits: Vec<u64>,
    /// Counts from start to end.
    pub times: Vec<u64>,
    /// Bytes transferred; empty in files that lack them.
    #[serde(default)]
    pub bytes: Vec<u64>,
}

/// Waits of a device's compute: each column has one entry for each wait.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct WaitLane {
    /// [Letters](Awaited::letter) of the reasons for waiting.
    pub kinds: String,
    /// Counts from the end of the previous wait, or from the step's start, to the wait's start.
    pub waits: Vec<u64>,
    /// Counts from start to end.
    pub times: Vec<u64>,
}

impl TimelineRecord {
    /// Creates a timeline of a step, simulated or [measured](Simulation::measured).
    #[must_use]
    pub fn new(actions: &Actions, step: &Simulation, unit: Unit) -> Self {
        let resolution = resolution(step.makespan());
        let unused = HostLinkUse::default();
        let host_link = |d: usize| step.host_links().get(d).unwrap_or(&unused);
        let lanes = step.timeline().iter().zip(step.devices()).enumerate();
        Self {
            unit,
            resolution,
            makespan: step.makespan(),
            bubble: step.bubble(),
            stages: actions.stages(),
            micro_batches: actions.micro_batches(),
            lanes: lanes
                .map(|(d, (spans, used))| Lane::new(spans, used, host_link(d), resolution))
                .collect(),
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

/// Returns a power of ten in which the makespan has about nine digits.
fn resolution(makespan: f64) -> f64 {
    const DIGITS: i32 = 9;
    let digits = makespan.log10().ceil();
    if digits.is_finite() { 10_f64.powi(digits as i32 - DIGITS) } else { 1e-9 }
}

impl Lane {
    fn new(spans: &[Span], used: &DeviceUse, host_link: &HostLinkUse, resolution: f64) -> Self {
        let (waits, times) = counts(spans.iter().map(|span| (span.start, span.end)), resolution);
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
            waits,
            times,
            bytes: bytes.collect(),
            inward: HostLinkLane::new(&host_link.transfers, TransferKind::is_inward, resolution),
            outward: HostLinkLane::new(&host_link.transfers, TransferKind::is_outward, resolution),
            awaited: WaitLane::new(&host_link.waits, resolution),
        }
    }

    fn check(&self, of: &TimelineRecord) -> Result<(), String> {
        let actions = self.kinds.len();
        check_kinds(&self.kinds, &ActionKind::ALL.map(ActionKind::letter), "the actions")?;
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
        self.inward.check(of)?;
        self.outward.check(of)?;
        self.awaited.check()
    }
}

impl HostLinkLane {
    fn new(
        transfers: &[TransferSpan],
        is_this_way: fn(TransferKind) -> bool,
        resolution: f64,
    ) -> Self {
        let here = || transfers.iter().filter(|span| is_this_way(span.transfer.kind));
        let (waits, times) = counts(here().map(|span| (span.start, span.end)), resolution);
        Self {
            kinds: here().map(|span| span.transfer.kind.letter()).collect(),
            stages: here().map(|span| span.transfer.stage.0).collect(),
            micro_batches: here().map(|span| span.transfer.micro_batch.map(|i| i.0)).collect(),
            waits,
            times,
            bytes: here().map(|span| span.bytes).collect(),
        }
    }

    fn check(&self, of: &TimelineRecord) -> Result<(), String> {
        let transfers = self.kinds.len();
        check_kinds(&self.kinds, &TransferKind::ALL.map(TransferKind::letter), "the transfers")?;
        let columns =
            [self.stages.len(), self.micro_batches.len(), self.waits.len(), self.times.len()];
        // Older files have no bytes.
        let bytes = Some(self.bytes.len()).filter(|bytes| *bytes > 0);
        if let Some(found) = columns.into_iter().chain(bytes).find(|found| *found != transfers) {
            return Err(format!("{transfers} transfers, but {found} entries in a column"));
        }
        match self.stages.iter().any(|stage| *stage as usize >= of.stages) {
            true => Err("a stage that the step has not, among the transfers".into()),
            false => Ok(()),
        }
    }
}

impl WaitLane {
    fn new(spans: &[WaitSpan], resolution: f64) -> Self {
        let (waits, times) = counts(spans.iter().map(|span| (span.start, span.end)), resolution);
        Self { kinds: spans.iter().map(|span| span.awaited.letter()).collect(), waits, times }
    }

    fn check(&self) -> Result<(), String> {
        check_kinds(&self.kinds, &Awaited::ALL.map(Awaited::letter), "what was waited for")?;
        let waits = self.kinds.len();
        match [self.waits.len(), self.times.len()].into_iter().find(|found| *found != waits) {
            Some(found) => Err(format!("{waits} waits, but {found} entries in a column")),
            None => Ok(()),
        }
    }
}

fn is_unused<T: Default + PartialEq>(lane: &T) -> bool {
    *lane == T::default()
}

/// Checks that a column of kinds has only these letters.
fn check_kinds(kinds: &str, letters: &[char], among: &str) -> Result<(), String> {
    match kinds.chars().find(|kind| !letters.contains(kind)) {
        Some(letter) => Err(format!("'{letter}' among {among}")),
        None => Ok(()),
    }
}

/// Returns the counts between spans and within them. Starts and ends are rounded instead of differences, so
/// that rounding errors do not add up.
fn counts(spans: impl Iterator<Item = (f64, f64)>, resolution: f64) -> (Vec<u64>, Vec<u64>) {
    let count = |time: f64| (time / resolution).round() as u64;
    let mut before = 0;
    let both = spans.map(|(start, end)| {
        let wait = count(start).saturating_sub(before);
        before = count(end);
        (wait, count(end).saturating_sub(count(start)))
    });
    both.unzip()
}

#[cfg(test)]
mod tests {
    use super::*;
    use brimful_plan::schedule::{
        Costs, HostLinkCost, Location, Recompute, Schedule, StageCost, StageLocation, Transfers,
        simulate, simulate_transfers,
    };

    type Damage = fn(&mut Lane);
    const BROKEN: [(&str, Damage); 4] = [
        ("a stage that is not there", |lane| lane.inward.stages[0] = 4),
        ("a transfer without its bytes", |lane| lane.outward.bytes.truncate(1)),
        ("a wait for nobody knows what", |lane| lane.awaited.kinds.replace_range(..1, "x")),
        ("a wait without its time", |lane| lane.awaited.times.clear()),
    ];

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

    /// Simulates a step with offloaded weights and boundaries.
    fn on_host() -> (TimelineRecord, Simulation) {
        let schedule = Schedule::BreadthFirst { stages_per_device: 4 };
        let actions = schedule.actions(1, 3, Recompute::Always).expect("a schedule");
        let location = StageLocation { boundaries: Location::Host, ..StageLocation::HOST };
        let transfers = Transfers::new(&actions, &[location; 4], 2).expect("moves");
        let stage = StageCost {
            fetched_bytes: 10,
            sent_bytes: 20,
            output_bytes: 3,
            ..StageCost::new(1.0, 1.0, 1.0)
        };
        let costs = Costs { host_link: HostLinkCost::equal(7.0), ..Costs::equal(4, stage) };
        let step = simulate_transfers(&actions, &transfers, &costs).expect("costs");
        (TimelineRecord::new(&actions, &step, Unit::Own), step)
    }

    #[test]
    fn transfers_is_reported_each_way_with_its_times() {
        let (timeline, step) = on_host();
        assert_eq!(timeline.check(), Ok(()));
        for (lane, is_inward) in
            [(&timeline.lanes[0].inward, true), (&timeline.lanes[0].outward, false)]
        {
            let spans = step.host_links()[0]
                .transfers
                .iter()
                .filter(|span| span.transfer.kind.is_inward() == is_inward);
            let mut now = 0;
            for (i, span) in spans.enumerate() {
                assert_eq!(lane.kinds.chars().nth(i), Some(span.transfer.kind.letter()));
                let micro_batch = span.transfer.micro_batch.map(|i| i.0);
                assert_eq!(
                    (lane.stages[i], lane.micro_batches[i], lane.bytes[i]),
                    (span.transfer.stage.0, micro_batch, span.bytes)
                );
                now += lane.waits[i] + lane.times[i];
                assert!((now as f64 * timeline.resolution - span.end).abs() < timeline.resolution);
            }
        }
        let kinds = [&timeline.lanes[0].inward, &timeline.lanes[0].outward].map(|lane| &lane.kinds);
        assert!("fid".chars().all(|kind| kinds[0].contains(kind)), "{kinds:?}");
        assert!("hou".chars().all(|kind| kinds[1].contains(kind)), "{kinds:?}");
    }

    #[test]
    fn what_was_waited_for_is_reported_and_broken_columns_are_found() {
        let (timeline, step) = on_host();
        let awaited = &timeline.lanes[0].awaited;
        let letters = step.host_links()[0].waits.iter().map(|wait| wait.awaited.letter());
        assert_eq!(awaited.kinds, letters.collect::<String>());
        assert!("wb".chars().all(|kind| awaited.kinds.contains(kind)), "{awaited:?}");
        let ends = awaited.waits.iter().zip(&awaited.times).map(|(wait, time)| wait + time);
        let last = step.host_links()[0].waits.last().expect("a wait").end;
        assert!(
            (ends.sum::<u64>() as f64 * timeline.resolution - last).abs() < timeline.resolution
        );
        for (what, damage) in BROKEN {
            let mut broken = timeline.clone();
            damage(&mut broken.lanes[0]);
            assert!(broken.check().is_err(), "{what}");
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
