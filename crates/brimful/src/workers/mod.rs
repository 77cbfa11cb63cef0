//! Workers: one long-lived thread for each device, which owns the device's part of the model and runs the closures
//! that are sent to it.
//!
//! Pipelines and replicas both run on such workers.
//!
//! *Streams.* Workers queue their work on the devices' default streams, as most callers do. If the caller has
//! entered a different stream, a worker's work runs after the work that was queued on this stream before the call.
//! Later work on this stream runs after the worker's work.

mod device;

use std::fmt;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{self, JoinHandle, ThreadId};

use brimful_torch::grad_mode::GradMode;
use brimful_torch::threads::limit_threads;
use tch::Device;

use crate::streams::{StreamFence, accelerators};
use crate::{Error, Result, oom};
pub use device::DeviceSpec;
pub(crate) use device::resolved;

/// Closure for a worker, which sends its own answer.
type Command<W> = Box<dyn FnOnce(&mut W) + Send>;

/// Workers of all devices. Dropping them waits until their threads have ended.
pub(crate) struct Workers<W> {
    members: Vec<WorkerThread<W>>,
    /// Accelerators on which the caller's and the workers' streams keep their order.
    accelerators: Vec<Device>,
}

struct WorkerThread<W> {
    /// `None` once the thread is to end.
    commands: Option<Sender<Command<W>>>,
    thread: Option<JoinHandle<()>>,
}

/// Pending answer of a worker.
struct Answer<T> {
    worker: usize,
    /// The value, with a stream fence after the work that the worker has queued.
    answered: Receiver<(Result<T>, Result<StreamFence>)>,
}

impl<T> Answer<T> {
    /// Waits for the answer. Later work on this thread's streams then runs after the worker's queued work.
    fn wait(self) -> Result<Result<T>> {
        let (value, fence) = self.answered.recv().map_err(|_| gone(self.worker))?;
        fence?.precede()?;
        Ok(value)
    }
}

impl<W: 'static> Workers<W> {
    /// Starts a thread for each device, and waits until all have built their workers.
    pub(crate) fn spawn<F>(devices: &[DeviceSpec], builders: Vec<F>) -> Result<Self>
    where
        F: FnOnce() -> Result<W> + Send + 'static,
    {
        let mut members = Vec::new();
        let mut answers = Vec::new();
        for (number, (device, build)) in devices.iter().cloned().zip(builders).enumerate() {
            let (commands, received) = channel();
            let (answer, built) = channel();
            let name = format!("brimful {number}");
            let work = move || work(&device, build, &answer, &received);
            let thread = thread::Builder::new().name(name).spawn(work);
            let thread = thread.map_err(|cause| Error::no_thread("a device's work", &cause))?;
            members.push(WorkerThread { commands: Some(commands), thread: Some(thread) });
            answers.push(built);
        }
        let accelerators = accelerators(devices.iter().map(|device| device.device));
        // Made before the answers are read: an error drops `workers`, which ends the threads and waits for them.
        let workers = Self { members, accelerators };
        let built: Vec<Result<()>> = answers
            .iter()
            .enumerate()
            .map(|(d, built)| built.recv().map_err(|_| gone(d))?)
            .collect();
        built.into_iter().collect::<Result<Vec<()>>>()?;
        Ok(workers)
    }

    /// Adds devices on which streams keep their order, because tensors for the workers are on them.
    pub(crate) fn involve(&mut self, devices: impl Iterator<Item = Device>) {
        self.accelerators = accelerators(self.accelerators.iter().copied().chain(devices));
    }

    pub(crate) fn len(&self) -> usize {
        self.members.len()
    }

    /// Runs every worker's job at the same time; returns their answers, in the workers' order.
    pub(crate) fn each<J: Send + 'static, T: Send + 'static>(
        &self,
        jobs: Vec<J>,
        f: impl Fn(&mut W, J) -> Result<T> + Clone + Send + 'static,
    ) -> Result<Vec<Result<T>>> {
        // All workers get their jobs before the first answer is awaited, because the workers of a pipeline wait
        // for each other.
        let mut answers = Vec::with_capacity(jobs.len());
        for (d, job) in jobs.into_iter().enumerate() {
            let f = f.clone();
            answers.push(self.ask(d, move |worker| f(worker, job))?);
        }
        answers.into_iter().map(Answer::wait).collect()
    }

    /// Runs every worker's job at the same time; returns all answers, or the first error.
    pub(crate) fn each_or_error<J: Send + 'static, T: Send + 'static>(
        &self,
        jobs: Vec<J>,
        f: impl Fn(&mut W, J) -> Result<T> + Clone + Send + 'static,
    ) -> Result<Vec<T>> {
        self.each(jobs, f)?.into_iter().collect()
    }

    /// Runs `f` on every worker; returns all answers, or the first error.
    pub(crate) fn all<T: Send + 'static>(
        &self,
        f: impl Fn(&mut W) -> Result<T> + Clone + Send + 'static,
    ) -> Result<Vec<T>> {
        let jobs = self.members.iter().map(|_| ()).collect();
        self.each_or_error(jobs, move |worker, ()| f(worker))
    }

    /// Runs `f` on one worker, and waits for the answer.
    pub(crate) fn one<T: Send + 'static>(
        &self,
        d: usize,
        f: impl FnOnce(&mut W) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.ask(d, f)?.wait()?
    }

    /// Sends `f` to a worker; returns the pending answer.
    fn ask<T: Send + 'static>(
        &self,
        d: usize,
        f: impl FnOnce(&mut W) -> Result<T> + Send + 'static,
    ) -> Result<Answer<T>> {
        let (answer, answered) = channel();
        // Made on the calling thread, because only that thread knows the stream that it has entered.
        let before = StreamFence::apart(&self.accelerators)?;
        let command: Command<W> = Box::new(move |worker| {
            let value = before.precede().and_then(|()| begun(|| f(worker)));
            // The caller may have gone.
            let _ = answer.send((value, before.since()));
        });
        let commands = self.members[d].commands.as_ref().ok_or_else(|| gone(d))?;
        commands.send(command).map_err(|_| gone(d))?;
        Ok(Answer { worker: d, answered })
    }
}

impl<W> Workers<W> {
    /// Returns the ids of the threads that still run.
    fn threads(&self) -> impl Iterator<Item = ThreadId> {
        self.members.iter().filter_map(|member| Some(member.thread.as_ref()?.thread().id()))
    }
}

impl<W> fmt::Debug for Workers<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Workers").field("workers", &self.members.len()).finish()
    }
}

impl<W> Drop for Workers<W> {
    fn drop(&mut self) {
        self.members.iter_mut().for_each(|member| member.commands = None);
        for thread in self.members.iter_mut().filter_map(|member| member.thread.take()) {
            // A thread that panicked was reported as gone.
            let _ = thread.join();
        }
    }
}

/// Runs a worker's thread: builds the worker, then runs its commands.
fn work<W>(
    device: &DeviceSpec,
    build: impl FnOnce() -> Result<W>,
    answer: &Sender<Result<()>>,
    commands: &Receiver<Command<W>>,
) {
    let _threads = device.threads.map(limit_threads);
    let _inside = device.arena.as_ref().map(|arena| arena.enter());
    let mut worker = match begun(build) {
        Ok(worker) => worker,
        Err(error) => return drop(answer.send(Err(error))),
    };
    let _ = answer.send(Ok(()));
    for command in commands {
        command(&mut worker);
    }
}

/// Runs a worker's closure with grad mode enabled, which an earlier closure may have disabled. Catches panics.
fn begun<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    let _graphs = GradMode::set(true);
    oom::caught(work)
}

fn gone(worker: usize) -> Error {
    Error::WorkerGone { worker }
}

/// Workers that one holder at a time may send work to.
pub(crate) struct SharedWorkers<W> {
    workers: Arc<Mutex<Workers<W>>>,
    threads: Arc<[ThreadId]>,
}

impl<W> fmt::Debug for SharedWorkers<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.workers.fmt(f)
    }
}

impl<W> Clone for SharedWorkers<W> {
    fn clone(&self) -> Self {
        Self { workers: Arc::clone(&self.workers), threads: Arc::clone(&self.threads) }
    }
}

impl<W> SharedWorkers<W> {
    pub(crate) fn new(workers: Workers<W>) -> Self {
        let threads = workers.threads().collect();
        Self { workers: Arc::new(Mutex::new(workers)), threads }
    }

    /// Waits until no other holder uses the workers.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Workers<W>> {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the workers for a holder that closures on the workers may call.
    ///
    /// # Errors
    /// When called on a thread of these workers while another holder has locked them, because that holder waits
    /// for this thread.
    pub(crate) fn lock_outside_step(&self) -> Result<MutexGuard<'_, Workers<W>>> {
        match self.workers.try_lock() {
            Ok(workers) => Ok(workers),
            Err(TryLockError::Poisoned(workers)) => Ok(workers.into_inner()),
            Err(TryLockError::WouldBlock) if self.threads.contains(&thread::current().id()) => {
                Err(Error::InStep)
            }
            Err(TryLockError::WouldBlock) => Ok(self.lock()),
        }
    }
}
