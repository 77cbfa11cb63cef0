//! The optimizer at home: it works through its stages on a thread of its own, while the next step
//! begins with those that are done.

use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::{self, JoinHandle};

use brimful_torch::foreach;
use brimful_torch::stream::Event;
use brimful_torch::threads::limit_threads;
use tch::Tensor;

use crate::Result;
use crate::optim::{Optimizer, OptimizerPlan};

/// A stage's whole gradients, on their way home.
#[derive(Debug)]
pub(crate) struct StageGradients {
    /// By parameter: those of several stages that share it are still to be added up.
    pub(crate) of: Vec<(String, Vec<Tensor>)>,
    pub(crate) arrived: Event,
}

impl StageGradients {
    fn apply(self, optimizer: &mut Optimizer) -> Result<()> {
        self.arrived.synchronize()?;
        let mut gradients = Vec::new();
        for (name, mut parts) in self.of {
            let sum = parts.swap_remove(0);
            for part in parts {
                foreach::add(&[sum.shallow_clone()], &[part], 1.0)?;
            }
            gradients.push((name, sum));
        }
        let plan = optimizer.prepare_with(&gradients)?;
        optimizer.commit(plan)
    }
}

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

    /// Lets the optimizer work on each stage's gradients as they are given, until the other end of the
    /// channel is dropped.
    pub(crate) fn follow(
        mut optimizer: Optimizer,
        threads: usize,
    ) -> (Sender<StageGradients>, Self) {
        let (give, given) = channel::<StageGradients>();
        // Nothing is told but the end: stages come last first, and the next step begins with the first.
        let (ended, done) = channel();
        let work = move || {
            let _threads = limit_threads(threads);
            let _ended = ended;
            let mut result = Ok(());
            for gradients in given {
                if result.is_ok() {
                    result = gradients.apply(&mut optimizer);
                }
            }
            (optimizer, result)
        };
        (give, Self { done, known: 0, thread: Some(thread::spawn(work)) })
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

    /// Whether the stage at this place, and all before it, are done; waits for nothing.
    pub(crate) fn has_done(&mut self, at: usize) -> bool {
        while self.known <= at {
            match self.done.try_recv() {
                Ok(done) => self.known = done + 1,
                Err(TryRecvError::Empty) => return false,
                Err(TryRecvError::Disconnected) => self.known = usize::MAX,
            }
        }
        true
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
