//! Samples that a dedicated thread loads on demand, ahead of their use.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::io;
use std::panic::resume_unwind;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, JoinHandle};

use anyhow::{Result, anyhow};
use brimful::Error;
use brimful_torch::threads::limit_threads;

use super::Examples;
use super::sample_set::SampleRequest;
use crate::setting::MeanOver;

/// Source of samples.
pub(super) trait SampleSource: Debug + Send + 'static {
    /// Returns the number of samples.
    fn len(&self) -> usize;

    /// Returns whether the loss is a mean over samples or over targets.
    fn mean_over(&self) -> MeanOver {
        MeanOver::Samples
    }

    /// Loads the requested samples.
    fn bring(&mut self, request: &SampleRequest) -> Result<Examples>;
}

/// Samples of a source that a thread owns.
#[derive(Debug)]
pub(crate) struct StreamedSamples {
    pub(super) len: usize,
    pub(super) mean_over: MeanOver,
    /// Requests sent to the thread, in order, until their samples are taken.
    asked: VecDeque<SampleRequest>,
    requests: Option<Sender<SampleRequest>>,
    brought: Receiver<Result<Examples>>,
    /// Loader thread: none once it has been joined, an error if it could not be started.
    thread: Option<io::Result<JoinHandle<()>>>,
}

impl StreamedSamples {
    pub(super) fn new(source: impl SampleSource) -> Self {
        Self::start(Builder::new(), source)
    }

    fn start(thread: Builder, mut source: impl SampleSource) -> Self {
        let (len, mean_over) = (source.len(), source.mean_over());
        let (requests, received) = channel::<SampleRequest>();
        let (answers, brought) = channel();
        let thread = thread.spawn(move || {
            // The other cores belong to the training, or to the source's own threads.
            let _alone = limit_threads(1);
            for request in received {
                if answers.send(source.bring(&request)).is_err() {
                    break;
                }
            }
        });
        let (requests, thread) = (Some(requests), Some(thread));
        Self { len, mean_over, asked: VecDeque::new(), requests, brought, thread }
    }

    /// Loads the requested samples, which may be prepared already.
    pub(super) fn bring(&mut self, request: &SampleRequest) -> Result<Examples> {
        while self.asked.front().is_some_and(|first| first != request) {
            // Drops samples that nothing requests, such as those prepared after the last step.
            drop(self.take());
        }
        if self.asked.is_empty() {
            self.prepare(request.clone());
        }
        self.take()
    }

    /// Sends a request to the thread, which works on it meanwhile.
    pub(super) fn prepare(&mut self, request: SampleRequest) {
        // If the thread is gone, `take` reports it.
        let _ = self.requests.as_ref().map(|requests| requests.send(request.clone()));
        self.asked.push_back(request);
    }

    fn take(&mut self) -> Result<Examples> {
        self.asked.pop_front();
        self.brought.recv().unwrap_or_else(|_| match self.thread.take() {
            Some(Ok(thread)) => {
                thread.join().unwrap_or_else(|panic| resume_unwind(panic));
                Err(anyhow!("the loader thread has ended"))
            }
            Some(Err(cause)) => {
                let (what, cause) = ("data loading".to_owned(), cause.to_string());
                Err(Error::NoThread { what, cause }.into())
            }
            None => Err(anyhow!("there is no loader thread")),
        })
    }
}

impl Drop for StreamedSamples {
    fn drop(&mut self) {
        self.requests = None;
        // Waits for the thread. Its last samples and any panic over them no longer matter.
        let _ = self.thread.take().and_then(Result::ok).map(JoinHandle::join);
    }
}

#[cfg(test)]
mod tests {
    use anyhow::ensure;
    use tch::Tensor;

    use super::*;

    /// Samples equal to their numbers; the seventh is broken.
    #[derive(Debug)]
    struct Counting;

    impl SampleSource for Counting {
        fn len(&self) -> usize {
            10
        }

        fn bring(&mut self, SampleRequest { numbers, .. }: &SampleRequest) -> Result<Examples> {
            ensure!(!numbers.contains(&7), "sample 7 is broken");
            let own: Vec<i64> = numbers.iter().map(|number| *number as i64).collect();
            Ok(Examples::whole(Tensor::from_slice(&own), Tensor::from_slice(&own)))
        }
    }

    fn numbers(streamed: &mut StreamedSamples, wanted: &[usize]) -> Vec<i64> {
        let brought = streamed.bring(&SampleRequest::plain(wanted.iter().copied()));
        brought.expect("samples").inputs.try_into().expect("numbers")
    }

    #[test]
    fn what_is_asked_for_comes_whatever_was_prepared() {
        let mut streamed = StreamedSamples::new(Counting);
        assert_eq!(numbers(&mut streamed, &[3, 1]), [3, 1]);
        for prepared in [vec![5, 6], vec![2]] {
            streamed.prepare(SampleRequest::plain(prepared));
        }
        assert_eq!(numbers(&mut streamed, &[5, 6]), [5, 6]);
        // Drops the other prepared request.
        assert_eq!(numbers(&mut streamed, &[0]), [0]);
    }

    #[test]
    fn a_source_that_fails_says_so_and_goes_on() {
        let mut streamed = StreamedSamples::new(Counting);
        let broken = streamed.bring(&SampleRequest::plain([7])).expect_err("broken").to_string();
        assert_eq!(broken, "sample 7 is broken");
        assert_eq!(numbers(&mut streamed, &[8]), [8]);
    }

    #[test]
    fn a_source_without_a_thread_says_so() {
        // No machine has such a stack.
        let mut streamed = StreamedSamples::start(Builder::new().stack_size(1 << 60), Counting);
        streamed.prepare(SampleRequest::plain([1]));
        let error = streamed.bring(&SampleRequest::plain([1])).expect_err("no thread").to_string();
        assert!(error.starts_with("no thread could be started for data loading"), "{error}");
    }
}
