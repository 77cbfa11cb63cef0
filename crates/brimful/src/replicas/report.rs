//! What one step of replicas did.

use std::time::Duration;

use crate::auto::{Decision, Story};
use crate::bytes::Bytes;

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
    /// Samples that each replica had.
    pub shares: Vec<usize>,
    /// Samples in each micro-batch, the first replica's first.
    pub sizes: Vec<usize>,
    /// The closure's outputs, joined in sample order, on the first replica's device.
    pub outputs: O,
    /// How long it took on the host.
    pub time: Duration,
    /// How long each replica ran its part; none for one without a sample.
    pub times: Vec<Option<Duration>>,
    /// The most memory in use at one moment on each device, where it is counted: on an accelerator,
    /// or in an arena that was given.
    pub peaks: Vec<Option<Bytes>>,
    /// Micro-batches that were replayed, see [`Replicas::replay`](crate::Replicas::replay).
    pub replayed: usize,
    /// The seed of the step's random numbers, or of its first mini-batch's: micro-batch `i` of replica
    /// `r`, each counted from 0, draws from a generator with the seed `Draws::new(seed, i).seed(r)`.
    pub seed: u64,
    /// What was decided about an automatic size, in order, failed tries included.
    pub decisions: Vec<Decision>,
    /// How often the mini-batch was run again because memory had run out.
    pub retries: usize,
}

impl<O> Step<O> {
    pub(super) fn with_story(self, story: Story) -> Self {
        Self { decisions: story.decisions, retries: story.retries, ..self }
    }
}
