//! A step that was run, in the form of a simulated one, so that both can be drawn and compared.

use super::memory;
use super::{Actions, Costs, DeviceUse, Simulation, Span, StageCost};
use crate::bytes::Bytes;

impl Simulation {
    /// What a device really did: its actions with their times, in any one unit and from any moment
    /// on, and the most bytes that it held, where they were counted.
    ///
    /// `timeline` and `peaks` have a part for each device; what is missing of `peaks` is 0.
    #[must_use]
    pub fn measured(actions: &Actions, timeline: &[Vec<Span>], peaks: &[Option<Bytes>]) -> Self {
        let spans = || timeline.iter().flatten();
        let start = spans().map(|span| span.start).fold(f64::INFINITY, f64::min);
        let makespan = spans().map(|span| span.end - start).fold(0.0, f64::max);
        let shifted =
            |span: &Span| Span { start: span.start - start, end: span.end - start, ..*span };
        let timeline: Vec<Vec<_>> =
            timeline.iter().map(|spans| spans.iter().map(shifted).collect()).collect();
        let without_bytes = Costs::equal(actions.stages(), StageCost::default());
        let device = |(d, spans): (usize, &Vec<Span>)| {
            let busy = spans.iter().map(|span| span.end - span.start).sum();
            DeviceUse {
                busy,
                idle: f64::max(makespan - busy, 0.0),
                peak_bytes: peaks.get(d).copied().flatten().unwrap_or_default().0,
                peak_held: memory::peak(actions, &without_bytes, spans).held,
            }
        };
        let devices = timeline.iter().enumerate().map(device).collect();
        Self { timeline, devices, makespan }
    }
}
