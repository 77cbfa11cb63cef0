//! The optimizer at home: it works through its stages on a thread of its own, while the next step
//! begins with those that are done; then it looks ahead at what that step's gradients will come to.

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

    /// Of several in the order in which they were sent, those that have arrived last; or those that will first.
    fn take_newest(sent: &mut Vec<Self>) -> Option<Self> {
        let has_arrived = |gradients: &Self| gradients.arrived.is_reached().unwrap_or(false);
        let newest = sent.iter().rposition(has_arrived).unwrap_or(0);
        (newest < sent.len()).then(|| sent.remove(newest))
    }

    /// Computes what a step with them comes to, until somebody wants the optimizer back.
    fn look_ahead(self, optimizer: &mut Optimizer, wanted: &AtomicBool) -> Result<()> {
        self.arrived.synchronize()?;
        let go_on = || !wanted.load(Ordering::Relaxed);
        for (name, parts) in self.of.iter().filter(|_| go_on()) {
            // What several stages share is added up by the step.
            if let [gradient] = &parts[..] {
                optimizer.look_ahead(name, gradient, go_on)?;
            }
        }
        Ok(())
    }
}

/// What the optimizer is given to do at home.
#[derive(Debug)]
pub(crate) enum HomeTask {
    /// Takes the learning rate, which was checked.
    Rate(f64),
    /// Updates a stage by its gradients.
    Follow(StageGradients),
    /// Computes what a step will make of a stage.
    LookAhead(StageGradients),
}

/// An optimizer and what it was to do, as they came: no thread could be started for them.
pub(crate) struct NotStarted {
    pub(crate) optimizer: Optimizer,
    pub(crate) plan: Option<OptimizerPlan>,
    pub(crate) error: Error,
}

/// An optimizer that is at work.
#[derive(Debug)]
pub(crate) struct Update {
    /// The places of stages, as they are done, in their order.
    done: Receiver<usize>,
    /// How many stages, from the first on, are known to be done.
    known: usize,
    /// None where nothing more will come.
    tasks: Option<Sender<HomeTask>>,
    /// Whether it was given gradients to look ahead from.
    pub(crate) looks_ahead: bool,
    /// Whether somebody waits for the optimizer, who has no use for what is only computed ahead.
    wanted: Arc<AtomicBool>,
    thread: Option<JoinHandle<(Optimizer, Result<()>)>>,
}

impl Update {
    /// Lets the optimizer do what it has prepared, with so many threads an operation, make room if it will look
    /// ahead, and then do what it is given. One that follows a backward updates each stage by its gradients as they
    /// are given, until it is [closed](Self::close).
    pub(crate) fn start(
        thread: thread::Builder,
        optimizer: Optimizer,
        plan: Option<OptimizerPlan>,
        hands_over: HandsOver,
        threads: usize,
    ) -> Result<Self, Box<NotStarted>> {
        let follows = hands_over == HandsOver::Following;
        // Nothing is to be waited for where there is nothing to do.
        let known = if plan.is_some() || follows { 0 } else { usize::MAX };
        let (tell, done) = channel();
        let (give, given) = channel();
        let wanted = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&wanted);
        // Sent when the thread is there: one that could not be started would take them with it.
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

    /// Gives it something to do when it is done with what it has; tells whether it will.
    pub(crate) fn give(&mut self, task: HomeTask) -> bool {
        self.looks_ahead |= matches!(task, HomeTask::LookAhead(_));
        // The thread listens until its channel is dropped.
        self.tasks.as_ref().is_some_and(|tasks| tasks.send(task).is_ok())
    }

    /// Nothing more will come.
    pub(crate) fn close(&mut self) {
        self.tasks = None;
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

    /// Waits for the end of what it has to do, and gives the optimizer back; looking ahead is left off.
    pub(crate) fn finish(mut self) -> (Optimizer, Result<()>) {
        let ended = self.end().expect("it is joined once");
        ended.expect("libtorch's refusals are errors, not panics")
    }

    fn end(&mut self) -> Option<thread::Result<(Optimizer, Result<()>)>> {
        self.wanted.store(true, Ordering::Relaxed);
        // Before the thread is waited for, which goes on as long as it may be given something.
        self.close();
        self.thread.take().map(JoinHandle::join)
    }
}

impl Drop for Update {
    fn drop(&mut self) {
        // Memory at home must not be given back while it is written to.
        let _ = self.end();
    }
}

/// All that an update's thread does.
fn work(
    optimizer: &mut Optimizer,
    plan: Option<OptimizerPlan>,
    (hands_over, tell): (HandsOver, Sender<usize>),
    given: Receiver<HomeTask>,
    wanted: &AtomicBool,
) -> Result<()> {
    // Nobody may listen any more, which is no reason to stop.
    let tell_of = |at| {
        let _ = tell.send(at);
    };
    let result = caught(|| plan.map_or(Ok(()), |plan| optimizer.commit_in_parts(plan, tell_of)));
    // All is done that anybody may wait for. Of what follows nothing is told but the end: stages come last
    // first, and the next step begins with the first.
    let end = if hands_over == HandsOver::Following {
        Some(tell)
    } else {
        drop(tell);
        None
    };
    // Of gradients that were changed since: the step was another.
    optimizer.forget_ahead();
    if hands_over == HandsOver::Ahead && result.is_ok() {
        make_room(optimizer, wanted);
    }
    let result = work_off(optimizer, given, wanted, result);
    drop(end);
    result
}

/// Makes room to look ahead while there is nothing else to do; without, the step computes it all.
fn make_room(optimizer: &mut Optimizer, wanted: &AtomicBool) {
    if let Err(cause) = caught(|| optimizer.make_room_ahead(|| !wanted.load(Ordering::Relaxed))) {
        tracing::debug!(%cause, "updates are not computed ahead");
    }
}

/// Does what comes, until nothing will; updates only while all went well. Looking ahead comes last, at the stage whose
/// gradients came last: what there is no time for is then of stages that the next step wants late.
fn work_off(
    optimizer: &mut Optimizer,
    tasks: Receiver<HomeTask>,
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
            Some(HomeTask::Rate(rate)) => result = result.and(optimizer.set_learning_rate(rate)),
            Some(HomeTask::Follow(gradients)) => {
                updated += 1;
                // Nobody may take it for the failure of a step that can be tried again.
                let told = |error| PipelineError::partly_updated(updated, &error).into();
                result = result.and_then(|()| caught(|| gradients.apply(optimizer)).map_err(told));
            }
            Some(HomeTask::LookAhead(gradients)) => ahead.push(gradients),
            None => match StageGradients::take_newest(&mut ahead) {
                // Nothing is lost: the step computes what was not computed ahead.
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
