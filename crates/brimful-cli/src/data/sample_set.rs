//! Samples to train or to test on, held in memory or streamed, brought in any order.

use anyhow::Result;
use tch::Tensor;

use super::Examples;
use super::streamed::{SampleSource, StreamedSamples};
use crate::setting::MeanOver;

/// Samples that can be asked for.
#[derive(Debug)]
pub(crate) enum SampleSet {
    Held(Examples),
    Streamed(StreamedSamples),
}

/// Which samples are to be brought.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SampleRequest {
    /// Their numbers, in the order in which they are wanted.
    pub(crate) numbers: Vec<usize>,
    /// Where that which is random about samples in training starts; in a test nothing is.
    pub(crate) seed: Option<u64>,
}

impl SampleRequest {
    /// Those of these numbers, as they are tested.
    pub(crate) fn plain(numbers: impl IntoIterator<Item = usize>) -> Self {
        Self { numbers: numbers.into_iter().collect(), seed: None }
    }
}

impl SampleSet {
    /// Samples that are made when they are asked for.
    pub(super) fn streamed(source: impl SampleSource) -> Self {
        Self::Streamed(StreamedSamples::new(source))
    }

    /// How many samples there are.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Held(examples) => examples.len(),
            Self::Streamed(streamed) => streamed.len,
        }
    }

    /// Whether they are made when they are asked for.
    pub(crate) fn is_streamed(&self) -> bool {
        matches!(self, Self::Streamed(_))
    }

    /// What their loss is a mean over.
    pub(crate) fn mean_over(&self) -> MeanOver {
        match self {
            Self::Held(_) => MeanOver::Samples,
            Self::Streamed(streamed) => streamed.mean_over,
        }
    }

    /// As many as are brought at once where all are wanted: all that are held anyway, or so many.
    pub(crate) fn at_once(&self, streamed: usize) -> usize {
        match self {
            Self::Held(examples) => examples.len().max(1),
            Self::Streamed(_) => streamed,
        }
    }

    /// The samples that are asked for.
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

    /// Has those made ready that will be asked for next.
    pub(crate) fn prepare(&mut self, request: SampleRequest) {
        if let Self::Streamed(streamed) = self {
            streamed.prepare(request);
        }
    }

    /// All of them, in their order.
    pub(crate) fn all(&mut self) -> Result<Examples> {
        self.bring(&SampleRequest::plain(0..self.len()))
    }
}
