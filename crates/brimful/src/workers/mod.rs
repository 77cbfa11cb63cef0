//! One long-lived thread for each device: it owns what lives there, and does what it is sent.
//!
//! The workers of a pipeline and the replicas of a model are such workers.
//!
//! *Streams.* Workers queue their work on the devices' common streams. A caller that does so too need
//! not care; for one that has entered another stream, a worker's work comes after what the caller has
//! queued until then, and what it queues afterwards comes after the worker's.

mod device;
mod error;
mod shared;

use std::fmt;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle, ThreadId};

use brimful_torch::threads::limit_threads;
use tch::Device;

use crate::gradient_mode::with_graphs;
use crate::queued::{Queued, accelerators};
use crate::{Error, Result, oom};
pub use device::DeviceSpec;
pub(crate) use device::settled;
pub use error::WorkerError;
pub(crate) use error::{into_error, panic_message};
pub(crate) use shared::SharedWorkers;

/// Work for a worker, which answers for itself.
type Command<W> = Box<dyn FnOnce(&mut W) + Send>;

/// All workers. Dropped, it waits until their threads have ended.
pub(crate) struct Workers<W> {
    members: Vec<WorkerThread<W>>,
    /// On which the order of a caller's and the workers' streams is kept.
    accelerators: Vec<Device>,
}

struct WorkerThread<W> {
    /// None when the thread is to end.
    commands: Option<Sender<Command<W>>>,
    thread: Option<JoinHandle<()>>,
}

/// A worker's answer that will come.
struct Answer<T> {
    worker: usize,
    /// With what the worker has queued until then.
    answered: Receiver<(Result<T>, Result<Queued>)>,
}

impl<T> Answer<T> {
    /// Waits for it; this thread's streams come after the worker's from then on.
    fn wait(self) -> Result<Result<T>> {
        let (value, queued) = self.answered.recv().map_err(|_| gone(self.worker))?;
        queued?.precede()?;
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
        // Before the answers are read: dropped by an error, it ends the threads and waits for them.
        let workers = Self { members, accelerators };
        let built: Vec<Result<()>> = answers
            .iter()
            .enumerate()
            .map(|(d, built)| built.recv().map_err(|_| gone(d))?)
            .collect();
        built.into_iter().collect::<Result<Vec<()>>>()?;
        Ok(workers)
    }

    /// Keeps the order on these devices too, which tensors for the workers are on.
    pub(crate) fn involve(&mut self, devices: impl Iterator<Item = Device>) {
        self.accelerators = accelerators(self.accelerators.iter().copied().chain(devices));
    }

    pub(crate) fn len(&self) -> usize {
        self.members.len()
    }

    /// Lets every worker do its job at the same time; their answers, in the workers' order.
    pub(crate) fn each<J: Send + 'static, T: Send + 'static>(
        &self,
        jobs: Vec<J>,
        f: impl Fn(&mut W, J) -> Result<T> + Clone + Send + 'static,
    ) -> Result<Vec<Result<T>>> {
        // All are asked before one is waited for: the workers of a pipeline wait for each other.
        let mut answers = Vec::with_capacity(jobs.len());
        for (d, job) in jobs.into_iter().enumerate() {
            let f = f.clone();
            answers.push(self.ask(d, move |worker| f(worker, job))?);
        }
        answers.into_iter().map(Answer::wait).collect()
    }

    /// The same; all answers, or the first error.
    pub(crate) fn each_or_error<J: Send + 'static, T: Send + 'static>(
        &self,
        jobs: Vec<J>,
        f: impl Fn(&mut W, J) -> Result<T> + Clone + Send + 'static,
    ) -> Result<Vec<T>> {
        self.each(jobs, f)?.into_iter().collect()
    }

    /// Lets every worker do the same; all answers, or the first error.
    pub(crate) fn all<T: Send + 'static>(
        &self,
        f: impl Fn(&mut W) -> Result<T> + Clone + Send + 'static,
    ) -> Result<Vec<T>> {
        let jobs = self.members.iter().map(|_| ()).collect();
        self.each_or_error(jobs, move |worker, ()| f(worker))
    }

    /// Lets one worker do something, and waits for it.
    pub(crate) fn one<T: Send + 'static>(
        &self,
        d: usize,
        f: impl FnOnce(&mut W) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.ask(d, f)?.wait()?
    }

    /// Sends a worker something to do; the answer will come.
    fn ask<T: Send + 'static>(
        &self,
        d: usize,
        f: impl FnOnce(&mut W) -> Result<T> + Send + 'static,
    ) -> Result<Answer<T>> {
        let (answer, answered) = channel();
        // On this thread: which stream was entered is known to the thread that did.
        let before = Queued::apart(&self.accelerators)?;
        let command: Command<W> = Box::new(move |worker| {
            let value = before.precede().and_then(|()| begun(|| f(worker)));
            // Whoever asked may have gone.
            let _ = answer.send((value, before.since()));
        });
        let commands = self.members[d].commands.as_ref().ok_or_else(|| gone(d))?;
        commands.send(command).map_err(|_| gone(d))?;
        Ok(Answer { worker: d, answered })
    }
}

impl<W> Workers<W> {
    /// Those that still run.
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
            // A thread that panicked has been reported as gone.
            let _ = thread.join();
        }
    }
}

/// A worker's thread, from its beginning to its end.
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

/// Does a worker's work, which begins with graphs whatever the work before it has left.
fn begun<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    oom::catch(|| with_graphs(true, work)).map_err(error::into_error)
}

fn gone(worker: usize) -> Error {
    WorkerError::Gone { worker }.into()
}
