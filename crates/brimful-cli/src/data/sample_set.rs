//! Samples to train or test on, held in memory or streamed, loaded in any order.

use anyhow::Result;
use tch::Tensor;

use super::Examples;
use super::streamed::{SampleSource, StreamedSamples};
use crate::setting::MeanOver;

/// Samples, loaded on request.
#[derive(Debug)]
pub(crate) enum SampleSet {
    Held(Examples),
    Streamed(StreamedSamples),
}

/// Request for samples.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SampleRequest {
    /// Numbers of the samples, in the requested order.
    pub(crate) numbers: Vec<usize>,
    /// Seed of random augmentation in training; none in a test.
    pub(crate) seed: Option<u64>,
}

impl SampleRequest {
    /// Requests samples without augmentation, as in a test.
    pub(crate) fn plain(numbers: impl IntoIterator<Item = usize>) -> Self {
        Self { numbers: numbers.into_iter().collect(), seed: None }
    }
}

impl SampleSet {
    /// Makes a set of samples that are loaded on demand.
    pub(super) fn streamed(source: impl SampleSource) -> Self {
        Self::Streamed(StreamedSamples::new(source))
    }

    /// Returns the number of samples.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Held(examples) => examples.len(),
            Self::Streamed(streamed) => streamed.len,
        }
    }

    /// Returns whether samples are loaded on demand.
    pub(crate) fn is_streamed(&self) -> bool {
        matches!(self, Self::Streamed(_))
    }

    /// Returns whether the loss is a mean over samples or over targets.
    pub(crate) fn mean_over(&self) -> MeanOver {
        match self {
            Self::Held(_) => MeanOver::Samples,
            Self::Streamed(streamed) => streamed.mean_over,
        }
    }

    /// Returns how many samples to load at once to visit all: every one if they are in memory, else `streamed`.
    pub(crate) fn at_once(&self, streamed: usize) -> usize {
        match self {
            Self::Held(examples) => examples.len().max(1),
            Self::Streamed(_) => streamed,
        }
    }

    /// Loads the requested samples.
    pub(crate) fn bring(&mut self, request: &SampleRequest) -> Result<Examples> {
        match self {
            Self::Held(examples) => {
                let numbers: Vec<i64> = request.numbers.iter().map(|n| *n as i64).collect();
                let numbers = Tensor::from_slice(&numbers);
                let chosen = |tensor: &Tensor| tensor.index_select(0, &numbers);
                Ok(Examples::whole(chosen(&examples.inputs), chosen(&examples.targets)))
            }
            Self::Streamed(streamed) => streamed.bring(request),
        }
    }

    /// Starts to prepare the samples of the next request.
    pub(crate) fn prepare(&mut self, request: SampleRequest) {
        if let Self::Streamed(streamed) = self {
            streamed.prepare(request);
        }
    }

    /// Loads all samples in order.
    pub(crate) fn all(&mut self) -> Result<Examples> {
        self.bring(&SampleRequest::plain(0..self.len()))
    }
}
