//! Independent jobs on several threads.

use std::panic::resume_unwind;
use std::sync::{Mutex, PoisonError};
use std::thread::{self, Builder};

use brimful_torch::threads::limit_threads;

/// Returns the number of cores.
pub(super) fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Runs the jobs on the calling thread and on helper threads, and returns the results in the jobs' order. If the system
/// cannot start a helper, the other threads run its jobs.
pub(super) fn each<J: Send, R: Send>(
    jobs: Vec<J>,
    threads: usize,
    work: impl Fn(J) -> R + Sync,
) -> Vec<R> {
    each_helped_by(Builder::new, jobs, threads, work)
}

fn each_helped_by<J: Send, R: Send>(
    helper: impl Fn() -> Builder,
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
        let helper = |_| helper().spawn_scoped(scope, worker).ok();
        let helpers: Vec<_> = (1..threads).map_while(helper).collect();
        let mut done = worker();
        for helper in helpers {
            done.extend(helper.join().unwrap_or_else(|panic| resume_unwind(panic)));
        }
        done
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

    #[test]
    fn jobs_are_done_where_no_helper_can_be_started() {
        // No machine has such a stack.
        let helper = || Builder::new().stack_size(1 << 60);
        let squares = each_helped_by(helper, vec![1, 2, 3], 3, |number: u64| number * number);
        assert_eq!(squares, [1, 4, 9]);
    }
}
