//! What one step of a pipeline did: loss, sizes, memory, and every action with its time.

use std::sync::Arc;
use std::time::Duration;

use crate::bytes::Bytes;
use crate::schedule::{Actions, Span, render};

/// What one step did.
#[derive(Debug)]
#[non_exhaustive]
pub struct Step<O = ()> {
    /// The mini-batch's loss.
    pub loss: f64,
    /// The loss's terms, in the order in which they were added, each with its factor.
    pub terms: Vec<f64>,
    /// Samples in the mini-batch.
    pub samples: usize,
    /// Samples in each micro-batch.
    pub sizes: Vec<usize>,
    /// What the closure gave beside its losses, joined in sample order.
    pub outputs: O,
    /// How long it took on the host.
    pub time: Duration,
    /// The most memory in use at one moment on each device, where it is counted: on an accelerator,
    /// or in an arena that was given.
    pub peaks: Vec<Option<Bytes>>,
    /// The seed of the step's random numbers: see [`Draws`](crate::Draws).
    pub seed: u64,
    /// The actions, as they were executed.
    pub actions: Arc<Actions>,
    /// For each device, its actions with their times in seconds since the step's start.
    pub timeline: Vec<Vec<Span>>,
}

impl<O> Step<O> {
    /// Idle time of all devices over all their time, from the first action's beginning to the last
    /// one's end, to be put beside the simulated one.
    #[must_use]
    pub fn bubble(&self) -> f64 {
        let spans = || self.timeline.iter().flatten();
        let start = spans().map(|span| span.start).fold(f64::INFINITY, f64::min);
        let end = spans().map(|span| span.end).fold(0.0, f64::max);
        let busy: f64 = spans().map(|span| span.end - span.start).sum();
        let all = (end - start) * self.timeline.len() as f64;
        if all > 0.0 { f64::max(1.0 - busy / all, 0.0) } else { 0.0 }
    }

    /// The step as Chrome trace JSON, which Perfetto and `chrome://tracing` open.
    #[must_use]
    pub fn trace(&self) -> String {
        render::measured_trace(&self.timeline)
    }

    pub(super) fn with_outputs<P>(self, outputs: P) -> Step<P> {
        let Self { loss, terms, samples, sizes, time, peaks, seed, actions, timeline, .. } = self;
        Step { loss, terms, samples, sizes, outputs, time, peaks, seed, actions, timeline }
    }
}
