//! The report of a step.

use std::sync::Arc;
use std::time::Duration;

use crate::auto::Decision;
use brimful_plan::bytes::Bytes;
use brimful_plan::schedule::{Actions, HostLinkUse, Span, render};

/// Report of an evaluation, or of a step: one mini-batch, or several up to their commit.
#[derive(Debug)]
#[non_exhaustive]
pub struct StepReport<O = ()> {
    /// The mini-batch's loss.
    pub loss: f64,
    /// The loss's terms, in the order in which they were added, each with its factor.
    pub terms: Vec<f64>,
    /// Samples in the mini-batch, including those of other ranks' replicas.
    pub samples: usize,
    /// Samples that each replica of this process had.
    pub shares: Vec<usize>,
    /// Samples in each micro-batch of this process, the first replica's first.
    pub sizes: Vec<usize>,
    /// The closure's outputs, joined in sample order.
    pub outputs: O,
    /// Time on the host, including the reading of the loss.
    pub time: Duration,
    /// Time of each replica's part in this process; `None` for a replica without a sample.
    pub times: Vec<Option<Duration>>,
    /// Peak memory of each device, where it is counted: on an accelerator, or in an arena that was given. A
    /// pipeline lists the devices of all ranks.
    pub peaks: Vec<Option<Bytes>>,
    /// Micro-batches that were replayed, see [`MicroBatcher::cuda_graphs`](crate::MicroBatcher::cuda_graphs).
    pub replayed: usize,
    /// Number of BatchNorm layers in this process that are not this library's, such as tch's own: their running
    /// statistics move at every micro-batch. Use [`nn::batch_norm2d`](crate::nn::batch_norm2d) (or 1d, 3d), whose
    /// statistics move once a step, as with the whole mini-batch. Known from the first training step with several
    /// micro-batches on.
    pub unmanaged_norms: usize,
    /// Seed of the step's random numbers, or of its first mini-batch's; `None` where the step draws as a plain
    /// loop does, as in a `MicroBatcher` without other ranks.
    ///
    /// With replicas and ranks, micro-batch `i` of replica `r` of rank `k`, each counted from 0, draws from a
    /// generator with the seed `StepRng::new(seed, i).seed(k + r * ranks)`. In a pipeline, layer `l` draws from
    /// `StepRng::new(seed, i).seed(l)`, where `i` counts over all replicas.
    pub seed: Option<u64>,
    /// A pipeline's actions, and when they ran.
    pub timeline: Option<Timeline>,
    /// Decisions about an automatic size, in order, including failed attempts.
    pub decisions: Vec<Decision>,
    /// Number of times that the mini-batch was rerun because memory had run out.
    pub retries: usize,
}

/// The actions of a pipeline's step, and when they ran.
#[derive(Debug)]
pub struct Timeline {
    /// The actions, as they were executed by each replica.
    pub actions: Arc<Actions>,
    /// For each device, its actions with their times in seconds since the step's start.
    pub spans: Vec<Vec<Span>>,
    /// For each device, its transfers over the host link and its waits for them, in seconds since the step's
    /// start; empty without transfers, or unless [requested](crate::Pipeline::trace_transfers).
    pub host_links: Vec<HostLinkUse>,
}

/// Figures that an engine adds to a step's report.
#[derive(Debug, Default)]
pub(crate) struct Figures {
    pub(crate) shares: Vec<usize>,
    pub(crate) sizes: Vec<usize>,
    pub(crate) times: Vec<Option<Duration>>,
    pub(crate) peaks: Vec<Option<Bytes>>,
    pub(crate) replayed: usize,
    pub(crate) unmanaged_norms: usize,
    pub(crate) timeline: Option<Timeline>,
}

impl<O> StepReport<O> {
    /// Creates the report of a mini-batch that waits for its commit.
    pub(super) fn of_outputs(outputs: O) -> Self {
        Self {
            loss: f64::NAN,
            terms: Vec::new(),
            samples: 0,
            shares: Vec::new(),
            sizes: Vec::new(),
            outputs,
            time: Duration::ZERO,
            times: Vec::new(),
            peaks: Vec::new(),
            replayed: 0,
            unmanaged_norms: 0,
            seed: None,
            timeline: None,
            decisions: Vec::new(),
            retries: 0,
        }
    }

    /// Returns the highest peak memory of a device, among the devices whose memory is counted.
    #[must_use]
    pub fn peak(&self) -> Option<Bytes> {
        self.peaks.iter().flatten().max().copied()
    }
}

impl Timeline {
    /// Returns the idle time of all devices as a fraction of all their time, from the first action's start to the
    /// last one's end; comparable to the simulated bubble.
    #[must_use]
    pub fn bubble(&self) -> f64 {
        let spans = || self.spans.iter().flatten();
        let start = spans().map(|span| span.start).fold(f64::INFINITY, f64::min);
        let end = spans().map(|span| span.end).fold(0.0, f64::max);
        let busy: f64 = spans().map(|span| span.end - span.start).sum();
        let all = (end - start) * self.spans.len() as f64;
        if all > 0.0 { f64::max(1.0 - busy / all, 0.0) } else { 0.0 }
    }

    /// Returns the step as Chrome trace JSON, which Perfetto and `chrome://tracing` open.
    #[must_use]
    pub fn trace(&self) -> String {
        render::measured_trace(&self.spans, &self.host_links)
    }
}
