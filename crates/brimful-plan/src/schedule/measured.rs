//! Converts a measured step into a [`Simulation`], so that it can be drawn, and compared with a simulated
//! one. Also converts it into costs, to simulate it again.

use super::memory;
use super::{ActionKind, Actions, Costs, DeviceUse, HostLinkUse, Simulation, Span, StageCost};
use crate::bytes::Bytes;

impl Costs {
    /// Returns the mean time of each kind of action on each stage. Transfers take no time. A step simulated with
    /// these costs computes for as long as the measured one did, and waits only because of the schedule.
    #[must_use]
    pub fn measured(actions: &Actions, timeline: &[Vec<Span>]) -> Self {
        let mut sums = vec![[(0.0, 0_usize); ActionKind::ALL.len()]; actions.stages()];
        for span in timeline.iter().flatten() {
            let (sum, count) = &mut sums[span.action.stage.index()][span.action.kind as usize];
            *sum += span.end - span.start;
            *count += 1;
        }
        let mean = |stage: &[(f64, usize)], kind| {
            let (sum, count) = stage[kind as usize];
            // Never below 0, whatever the clocks say, because a simulation refuses negative times.
            if count > 0 { f64::max(sum / count as f64, 0.0) } else { 0.0 }
        };
        let cost = |stage: &[(f64, usize); ActionKind::ALL.len()]| StageCost {
            forward: mean(stage, ActionKind::Forward),
            backward: mean(stage, ActionKind::Backward),
            input_gradient: mean(stage, ActionKind::InputGradient),
            weight_gradient: mean(stage, ActionKind::WeightGradient),
            recompute: mean(stage, ActionKind::Recompute),
            ..StageCost::default()
        };
        Self { stages: sums.iter().map(cost).collect(), ..Self::default() }
    }
}

impl Simulation {
    /// Returns a measured step. Times may have any unit and any origin, but actions and transfers must have the
    /// same unit and origin.
    ///
    /// `timeline`, `host_links` and `peaks` have an element for each device. `host_links` is empty if
    /// transfers were not timed; missing peaks count as 0.
    #[must_use]
    pub fn measured(
        actions: &Actions,
        timeline: &[Vec<Span>],
        host_links: &[HostLinkUse],
        peaks: &[Option<Bytes>],
    ) -> Self {
        let of_actions = timeline.iter().flatten().map(|span| (span.start, span.end));
        let times = || of_actions.clone().chain(host_links.iter().flat_map(HostLinkUse::times));
        let start = times().map(|(start, _)| start).fold(f64::INFINITY, f64::min);
        let makespan = times().map(|(_, end)| end - start).fold(0.0, f64::max);
        let shifted =
            |span: &Span| Span { start: span.start - start, end: span.end - start, ..*span };
        let timeline: Vec<Vec<_>> =
            timeline.iter().map(|spans| spans.iter().map(shifted).collect()).collect();
        let device = |(d, spans): (usize, &Vec<Span>)| {
            let busy = spans.iter().map(|span| span.end - span.start).sum();
            DeviceUse {
                busy,
                idle: f64::max(makespan - busy, 0.0),
                peak_bytes: peaks.get(d).copied().flatten().unwrap_or_default().0,
                peak_held: memory::most_held(actions, spans),
            }
        };
        let host_links = host_links.iter().map(|host_link| host_link.since(start)).collect();
        let devices = timeline.iter().enumerate().map(device).collect();
        Self { devices, timeline, makespan, host_links, levels: Vec::new() }
    }
}
