//! Log of a step's automatic size: its decisions and the number of retries.

use super::decision::Decision;
use super::sizer::{FreeMemory, Sizer, tightest};
use crate::oom::OutOfMemory;
use crate::{Error, Result};
use brimful_plan::bytes::Bytes;

/// Decisions and retries of a step so far.
#[derive(Debug, Default)]
pub(crate) struct SizeLog {
    pub(crate) decisions: Vec<Decision>,
    pub(crate) retries: usize,
    /// Whether the last attempt failed with a single sample: one such failure may be bad luck, two in a row are
    /// not.
    at_the_end: bool,
}

impl SizeLog {
    /// Creates the log of a mini-batch that was run twice, without a decision about its size.
    pub(crate) fn of_retry() -> Self {
        Self { retries: 1, ..Self::default() }
    }

    pub(crate) fn extend(&mut self, later: Self) {
        self.decisions.extend(later.decisions);
        self.retries += later.retries;
    }

    /// Records a failed attempt with its decisions. Fails if micro-batches of `least`, the smallest possible size,
    /// have failed twice in a row; otherwise the step is retried.
    pub(crate) fn failed(
        &mut self,
        decisions: Vec<Decision>,
        least: usize,
        sizer: &Sizer,
        free_memories: &[FreeMemory],
        cause: OutOfMemory,
    ) -> Result<()> {
        let single = decisions.last().is_none_or(|decision| decision.size <= least);
        self.decisions.extend(decisions);
        self.retries += 1;
        if !(std::mem::replace(&mut self.at_the_end, single) && single) {
            return Ok(());
        }
        let failed = self.decisions.iter().filter(|decision| decision.failed);
        let mut tried: Vec<usize> = failed.map(|decision| decision.size).collect();
        tried.dedup();
        let available = Bytes(tightest(free_memories));
        // The failure refutes a prediction below the free bytes: the need exceeds them by at least the lacking
        // bytes.
        let refuted = cause.lacking().map(|lacking| available.0.saturating_add(lacking.0));
        let needed = sizer.predict(least).max(refuted).map(Bytes);
        Err(Error::DoesNotFit { tried, needed, available, cause: Box::new(cause) })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Goal, Why};
    use super::*;
    use crate::oom::Place;

    /// Returns the decision for a single sample that ran out of memory.
    fn single(available: Bytes) -> Decision {
        Decision {
            size: 1,
            micro_batches: 1,
            why: Why::BackOff,
            predicted: None,
            measured: None,
            available,
            failed: true,
        }
    }

    #[test]
    fn what_is_said_to_be_needed_is_more_than_what_was_free() {
        let free_memories = [FreeMemory { available: 971, budget: 971 }];
        // The step is predicted to need 723 bytes, which are free; yet it fails.
        let sizer = Sizer::new(Goal::Fastest, &[723]);
        let cause = OutOfMemory {
            place: Place::Arena("test".into()),
            asked: Some(Bytes(200)),
            in_use: Some(Bytes(1900)),
            limit: Some(Bytes(2000)),
            message: String::new(),
        };
        let mut log = SizeLog::default();
        log.failed(vec![single(Bytes(971))], 1, &sizer, &free_memories, cause.clone())
            .expect("once is luck");
        let failed = log.failed(vec![single(Bytes(971))], 1, &sizer, &free_memories, cause);
        let Err(Error::DoesNotFit { needed, available, .. }) = failed else {
            panic!("{failed:?}");
        };
        assert_eq!((needed, available), (Some(Bytes(971 + 100)), Bytes(971)));
    }
}
