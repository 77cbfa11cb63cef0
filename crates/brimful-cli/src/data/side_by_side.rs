//! Independent jobs on several threads.

use std::panic::resume_unwind;
use std::sync::{Mutex, PoisonError};
use std::thread;

use brimful_torch::threads::limit_threads;

/// Returns the number of cores.
pub(super) fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Returns the results of the jobs, in order. A thread that finishes a job takes the next one.
pub(super) fn each<J: Send, R: Send>(
    jobs: Vec<J>,
    threads: usize,
    work: impl Fn(J) -> R + Sync,
) -> Vec<R> {
    let threads = threads.min(jobs.len());
    let jobs = Mutex::new(jobs.into_iter().enumerate());
    let next = || jobs.lock().unwrap_or_else(PoisonError::into_inner).next();
    let worker = || {
        // The other cores are busy with the other threads.
        let _alone = limit_threads(1);
        let mut done = Vec::new();
        while let Some((place, job)) = next() {
            done.push((place, work(job)));
        }
        done
    };
    let mut done: Vec<(usize, R)> = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
        let ended = workers.into_iter().map(|worker| worker.join());
        ended.flat_map(|done| done.unwrap_or_else(|panic| resume_unwind(panic))).collect()
    });
    done.sort_unstable_by_key(|(place, _)| *place);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_come_in_the_order_of_their_jobs() {
        for threads in [1, 3, 40] {
            let squares = each((0..20).collect(), threads, |number: u64| number * number);
            assert!(squares.into_iter().eq((0..20).map(|number| number * number)), "{threads}");
        }
        assert!(each(Vec::<u64>::new(), 4, |number| number).is_empty());
    }
}
