//! Runs the optimizer of offloaded stages on a thread of its own, while the next step begins with the
//! stages that are updated; then computes that step's update speculatively from its gradients.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::{self, JoinHandle};

use brimful_torch::foreach;
use brimful_torch::stream::Event;
use brimful_torch::threads::limit_threads;
use tch::Tensor;

use super::HandsOver;
use crate::optim::{Optimizer, OptimizerPlan};
use crate::pipeline::error::PipelineError;
use crate::step::caught;
use crate::{Error, Result};

/// Complete gradients of a stage, in transfer to the host.
#[derive(Debug)]
pub(crate) struct StageGradients {
    /// By parameter; a tied parameter has one gradient for each of its stages, not yet added up.
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

    /// Takes the stage that was sent last among those that have arrived; if none has, the one sent first.
    fn take_newest(sent: &mut Vec<Self>) -> Option<Self> {
        let has_arrived = |gradients: &Self| gradients.arrived.is_reached().unwrap_or(false);
        let newest = sent.iter().rposition(has_arrived).unwrap_or(0);
        (newest < sent.len()).then(|| sent.remove(newest))
    }

    /// Computes the update speculatively, until another thread wants the optimizer back.
    fn look_ahead(self, optimizer: &mut Optimizer, wanted: &AtomicBool) -> Result<()> {
        self.arrived.synchronize()?;
        let go_on = || !wanted.load(Ordering::Relaxed);
        for (name, parts) in self.of.iter().filter(|_| go_on()) {
            // The step adds up the gradients of tied parameters.
            if let [gradient] = &parts[..] {
                optimizer.look_ahead(name, gradient, go_on)?;
            }
        }
        Ok(())
    }
}

/// Task of the host optimizer.
#[derive(Debug)]
pub(crate) enum UpdateTask {
    /// Sets the learning rate, already checked.
    Rate(f64),
    /// Updates a stage by its gradients.
    InBackward(StageGradients),
    /// Computes a stage's update speculatively.
    LookAhead(StageGradients),
}

/// Optimizer and plan of an update whose thread could not be started.
pub(crate) struct NotStarted {
    pub(crate) optimizer: Optimizer,
    pub(crate) plan: Option<OptimizerPlan>,
    pub(crate) error: Error,
}

/// Optimizer at work on its thread.
#[derive(Debug)]
pub(crate) struct Update {
    /// Places of stages, in order, as their updates finish.
    done: Receiver<usize>,
    /// Number of leading stages known to be updated.
    known: usize,
    /// None once no further task will come.
    tasks: Option<Sender<UpdateTask>>,
    /// Whether the optimizer got gradients for speculative updates.
    pub(crate) looks_ahead: bool,
    /// Whether a thread waits for the optimizer, which then stops computing speculatively.
    wanted: Arc<AtomicBool>,
    thread: Option<JoinHandle<(Optimizer, Result<()>)>>,
}

impl Update {
    /// Starts a thread with so many threads an operation. It commits the plan, makes memory for speculative
    /// updates if it will compute any, and then works on tasks. An optimizer that updates in the backward
    /// updates each stage as its gradients arrive, until it is [closed](Self::close).
    pub(crate) fn start(
        thread: thread::Builder,
        optimizer: Optimizer,
        plan: Option<OptimizerPlan>,
        hands_over: HandsOver,
        threads: usize,
    ) -> Result<Self, Box<NotStarted>> {
        let updates_in_backward = hands_over == HandsOver::InBackward;
        // Without work, callers need not wait for any stage.
        let known = if plan.is_some() || updates_in_backward { 0 } else { usize::MAX };
        let (tell, done) = channel();
        let (give, given) = channel();
        let wanted = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&wanted);
        // Sent once the thread exists: a failed start would drop them.
        let (hand, handed) = channel::<(Optimizer, Option<OptimizerPlan>)>();
        let run = move || {
            let (mut optimizer, plan) = handed.recv().expect("it is sent at once");
            let _threads = limit_threads(threads);
            let result = work(&mut optimizer, plan, (hands_over, tell), given, &seen);
            (optimizer, result)
        };
        let thread = match thread.spawn(run) {
            Ok(thread) => thread,
            Err(cause) => {
                let error = Error::no_thread("the optimizer's updates on the host", &cause);
                return Err(Box::new(NotStarted { optimizer, plan, error }));
            }
        };
        hand.send((optimizer, plan)).expect("it listens");
        let (tasks, thread) = (Some(give), Some(thread));
        Ok(Self { done, known, tasks, looks_ahead: false, wanted, thread })
    }

    /// Gives the optimizer a further task; returns whether it will do it.
    pub(crate) fn give(&mut self, task: UpdateTask) -> bool {
        self.looks_ahead |= matches!(task, UpdateTask::LookAhead(_));
        // The thread receives until its channel is dropped.
        self.tasks.as_ref().is_some_and(|tasks| tasks.send(task).is_ok())
    }

    /// Ends the tasks: no further one will come.
    pub(crate) fn close(&mut self) {
        self.tasks = None;
    }

    /// Waits until the stage at this place, and all before it, are updated.
    pub(crate) fn wait_for(&mut self, at: usize) {
        while self.known <= at {
            match self.done.recv() {
                Ok(done) => self.known = done + 1,
                // The thread has ended, so no further update will come; `finish` returns its result.
                Err(_) => self.known = usize::MAX,
            }
        }
    }

    /// Returns whether the stage at this place, and all before it, are updated; does not wait.
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

    /// Waits for the end of the updates, and returns the optimizer; stops computing speculatively.
    pub(crate) fn finish(mut self) -> (Optimizer, Result<()>) {
        let ended = self.end().expect("it is joined once");
        ended.expect("libtorch's refusals are errors, not panics")
    }

    fn end(&mut self) -> Option<thread::Result<(Optimizer, Result<()>)>> {
        self.wanted.store(true, Ordering::Relaxed);
        // Before the join: the thread runs until its task channel is closed.
        self.close();
        self.thread.take().map(JoinHandle::join)
    }
}

impl Drop for Update {
    fn drop(&mut self) {
        // Host memory must not be freed while the thread writes to it.
        let _ = self.end();
    }
}

/// Body of an update's thread.
fn work(
    optimizer: &mut Optimizer,
    plan: Option<OptimizerPlan>,
    (hands_over, tell): (HandsOver, Sender<usize>),
    given: Receiver<UpdateTask>,
    wanted: &AtomicBool,
) -> Result<()> {
    // The receiver may be gone, which is no reason to stop.
    let tell_of = |at| {
        let _ = tell.send(at);
    };
    let result = caught(|| plan.map_or(Ok(()), |plan| optimizer.commit_in_parts(plan, tell_of)));
    // From here on only the channel's end is reported: updates in the backward finish with the first stage,
    // which the next step begins with, so they keep the channel open until all are done.
    let end = if hands_over == HandsOver::InBackward {
        Some(tell)
    } else {
        drop(tell);
        None
    };
    // Gradients that changed since belong to another step.
    optimizer.forget_ahead();
    if hands_over == HandsOver::Ahead && result.is_ok() {
        allocate_ahead(optimizer, wanted);
    }
    let result = work_off(optimizer, given, wanted, result);
    drop(end);
    result
}

/// Allocates memory for speculative updates while idle; without it, the step computes the whole update.
fn allocate_ahead(optimizer: &mut Optimizer, wanted: &AtomicBool) {
    if let Err(cause) = caught(|| optimizer.allocate_ahead(|| !wanted.load(Ordering::Relaxed))) {
        tracing::debug!(%cause, "updates are not computed ahead");
    }
}

/// Works on tasks until the channel closes; updates only while no update has failed. Speculative updates
/// come last, for the stage whose gradients arrived last: stages that remain undone are those that the next
/// step needs late.
fn work_off(
    optimizer: &mut Optimizer,
    tasks: Receiver<UpdateTask>,
    wanted: &AtomicBool,
    mut result: Result<()>,
) -> Result<()> {
    let mut ahead = Vec::new();
    let mut updated = 0;
    loop {
        let task = match ahead.is_empty() {
            true => tasks.recv().ok(),
            false => tasks.try_recv().ok(),
        };
        match task {
            Some(UpdateTask::Rate(rate)) => result = result.and(optimizer.set_learning_rate(rate)),
            Some(UpdateTask::InBackward(gradients)) => {
                updated += 1;
                // A caller must not take this for a failed step that can be retried.
                let reported = |error| PipelineError::partly_updated(updated, &error).into();
                result =
                    result.and_then(|()| caught(|| gradients.apply(optimizer)).map_err(reported));
            }
            Some(UpdateTask::LookAhead(gradients)) => ahead.push(gradients),
            None => match StageGradients::take_newest(&mut ahead) {
                // The step computes whatever was not computed speculatively.
                Some(gradients) if result.is_ok() => {
                    if let Err(cause) = caught(|| gradients.look_ahead(optimizer, wanted)) {
                        tracing::debug!(%cause, "a stage's update is not computed ahead");
                    }
                }
                Some(_) => {}
                None => return result,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::Sgd;
    use brimful_torch::autograd::set_gradient;
    use tch::{Device, Kind};

    #[test]
    fn an_optimizer_without_a_thread_comes_back_with_what_it_was_to_do() {
        let one = (Kind::Float, Device::Cpu);
        let mut parameter = Tensor::ones([4], one).set_requires_grad(true);
        set_gradient(&mut parameter, Some(&Tensor::ones([4], one))).expect("a gradient");
        let named = vec![("weight".to_owned(), parameter.shallow_clone())];
        let optimizer = Optimizer::for_named(named, Sgd::new(0.5)).expect("an optimizer");
        let plan = optimizer.prepare().expect("a plan");
        // No machine has such a stack.
        let thread = thread::Builder::new().stack_size(1 << 60);
        let started = Update::start(thread, optimizer, Some(plan), HandsOver::Ahead, 1);
        let NotStarted { mut optimizer, plan, error } = *started.expect_err("no thread");
        assert!(error.to_string().contains("ulimit -u"), "{error}");
        assert_eq!(parameter, Tensor::ones([4], one), "nothing was done");
        optimizer.commit(plan.expect("the plan")).expect("a step");
        assert_eq!(parameter, Tensor::ones([4], one) * 0.5);
    }
}
