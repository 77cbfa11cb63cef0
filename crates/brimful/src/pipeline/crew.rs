//! The workers' threads: they live as long as the pipeline, and do what they are sent.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use brimful_torch::threads::limit_threads;

use super::error::{self, PipelineError};
use super::worker::{Blueprint, Worker};
use crate::{Error, Result, oom};

/// Work for a worker, which answers for itself.
type Command = Box<dyn FnOnce(&mut Worker) + Send>;

/// All workers. Dropped, it waits until their threads have ended.
#[derive(Debug)]
pub(super) struct Crew {
    members: Vec<Member>,
}

#[derive(Debug)]
struct Member {
    /// None when the thread is to end.
    commands: Option<Sender<Command>>,
    thread: Option<JoinHandle<()>>,
}

impl Crew {
    /// Starts a thread for each blueprint, and waits until all have built their stages.
    pub(super) fn hire(blueprints: Vec<Blueprint>) -> Result<Self> {
        let mut members = Vec::new();
        let mut answers = Vec::new();
        for blueprint in blueprints {
            let (commands, received) = channel();
            let (answer, built) = channel();
            let name = format!("brimful {}", blueprint.number);
            let work = move || work(&blueprint, &answer, &received);
            let thread = thread::Builder::new().name(name).spawn(work);
            let thread = thread.map_err(|error| Error::Torch(format!("no thread: {error}")))?;
            members.push(Member { commands: Some(commands), thread: Some(thread) });
            answers.push(built);
        }
        let crew = Self { members };
        let built: Vec<Result<()>> = answers
            .iter()
            .enumerate()
            .map(|(d, built)| built.recv().map_err(|_| gone(d))?)
            .collect();
        built.into_iter().collect::<Result<Vec<()>>>()?;
        Ok(crew)
    }

    /// How many workers there are.
    pub(super) fn len(&self) -> usize {
        self.members.len()
    }

    /// Lets every worker do its job at the same time; their answers, in the workers' order.
    pub(super) fn each<J: Send + 'static, T: Send + 'static>(
        &self,
        jobs: Vec<J>,
        f: impl Fn(&mut Worker, J) -> Result<T> + Clone + Send + 'static,
    ) -> Result<Vec<Result<T>>> {
        let mut answers = Vec::with_capacity(jobs.len());
        for ((d, member), job) in self.members.iter().enumerate().zip(jobs) {
            let (answer, answered) = channel();
            let f = f.clone();
            let command: Command = Box::new(move |worker| {
                // Whoever asked may have gone.
                let _ = answer.send(oom::catch(|| f(worker, job)).map_err(error::of));
            });
            let commands = member.commands.as_ref().ok_or_else(|| gone(d))?;
            commands.send(command).map_err(|_| gone(d))?;
            answers.push(answered);
        }
        let answer = |(d, answered): (usize, Receiver<_>)| answered.recv().map_err(|_| gone(d));
        answers.into_iter().enumerate().map(answer).collect()
    }

    /// The same; all answers, or the first error.
    pub(super) fn each_or_error<J: Send + 'static, T: Send + 'static>(
        &self,
        jobs: Vec<J>,
        f: impl Fn(&mut Worker, J) -> Result<T> + Clone + Send + 'static,
    ) -> Result<Vec<T>> {
        self.each(jobs, f)?.into_iter().collect()
    }

    /// Lets every worker do the same; all answers, or the first error.
    pub(super) fn all<T: Send + 'static>(
        &self,
        f: impl Fn(&mut Worker) -> Result<T> + Clone + Send + 'static,
    ) -> Result<Vec<T>> {
        let jobs = self.members.iter().map(|_| ()).collect();
        self.each_or_error(jobs, move |worker, ()| f(worker))
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.members.iter_mut().for_each(|member| member.commands = None);
        for thread in self.members.iter_mut().filter_map(|member| member.thread.take()) {
            // A thread that panicked has been reported as gone.
            let _ = thread.join();
        }
    }
}

/// A worker's thread, from its beginning to its end.
fn work(blueprint: &Blueprint, answer: &Sender<Result<()>>, commands: &Receiver<Command>) {
    let device = &blueprint.device;
    let _threads = device.threads.map(limit_threads);
    let _inside = device.arena.as_ref().map(|arena| arena.enter());
    let mut worker = match Worker::build(blueprint) {
        Ok(worker) => worker,
        Err(error) => return drop(answer.send(Err(error))),
    };
    let _ = answer.send(Ok(()));
    for command in commands {
        command(&mut worker);
    }
}

fn gone(device: usize) -> Error {
    PipelineError::WorkerGone { device }.into()
}
