//! The optimizer at home: it works through its stages on a thread of its own, while the next step
//! begins with those that are done.

use std::sync::mpsc::{Receiver, channel};
use std::thread::{self, JoinHandle};

use brimful_torch::threads::limit_threads;

use crate::Result;
use crate::optim::{Optimizer, OptimizerPlan};

/// An update that is under way.
#[derive(Debug)]
pub(crate) struct Update {
    /// The places of stages, as they are done, in their order.
    done: Receiver<usize>,
    /// How many stages, from the first on, are known to be done.
    known: usize,
    thread: Option<JoinHandle<(Optimizer, Result<()>)>>,
}

impl Update {
    /// Lets the optimizer do what it has prepared, with so many threads an operation.
    pub(crate) fn start(mut optimizer: Optimizer, plan: OptimizerPlan, threads: usize) -> Self {
        let (tell, done) = channel();
        let work = move || {
            let _threads = limit_threads(threads);
            // Nobody may listen any more, which is no reason to stop.
            let result = optimizer.commit_in_parts(plan, |at| {
                let _ = tell.send(at);
            });
            (optimizer, result)
        };
        Self { done, known: 0, thread: Some(thread::spawn(work)) }
    }

    /// Waits until the stage at this place, and all before it, are done.
    pub(crate) fn wait_for(&mut self, at: usize) {
        while self.known <= at {
            match self.done.recv() {
                Ok(done) => self.known = done + 1,
                // It has ended: all are done that ever will be. How it ended, `finish` says.
                Err(_) => self.known = usize::MAX,
            }
        }
    }

    /// Waits for the end, and gives the optimizer back.
    pub(crate) fn finish(mut self) -> (Optimizer, Result<()>) {
        let thread = self.thread.take().expect("it is joined once");
        thread.join().expect("libtorch's refusals are errors, not panics")
    }
}

impl Drop for Update {
    fn drop(&mut self) {
        // Memory at home must not be given back while it is written to.
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
