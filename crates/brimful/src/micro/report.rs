//! What one step did.

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
    /// Samples in each micro-batch.
    pub sizes: Vec<usize>,
    /// The closure's outputs, joined in sample order.
    pub outputs: O,
    /// The seed of its random numbers, where several ranks took part: micro-batch `i` of rank `r`,
    /// each counted from 0, draws from a generator with the seed `Draws::new(seed, i).seed(r)`.
    pub seed: Option<u64>,
    /// Micro-batches that were replayed, see [`MicroBatcher::replay`](crate::MicroBatcher::replay).
    pub replayed: usize,
    /// How long it took on the host, the reading of the loss included.
    pub time: Duration,
    /// The most memory in use at one moment, where it is counted: on an accelerator, or in an arena
    /// that was given.
    pub peak: Option<Bytes>,
    /// What was decided about an automatic size, in order, failed tries included.
    pub decisions: Vec<Decision>,
    /// How often the mini-batch was run again because memory had run out.
    pub retries: usize,
}

impl Step {
    pub(super) fn with_outputs<O>(self, outputs: O) -> Step<O> {
        let Self { loss, terms, samples, sizes, outputs: (), seed, replayed, .. } = self;
        let Self { time, peak, decisions, retries, .. } = self;
        Step {
            loss,
            terms,
            samples,
            sizes,
            outputs,
            seed,
            replayed,
            time,
            peak,
            decisions,
            retries,
        }
    }
}

impl<O> Step<O> {
    pub(super) fn with_story(self, story: Story) -> Self {
        Self { decisions: story.decisions, retries: story.retries, ..self }
    }
}
