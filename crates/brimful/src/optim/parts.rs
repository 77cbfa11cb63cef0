//! Parts of an optimizer or of averages: one for a store, or one for each worker of a pipeline.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tch::Tensor;

use crate::pipeline::{Pipeline, Ranks, Worker};
use crate::save::Metadata;
use crate::workers::{SharedWorkers, Workers};
use crate::{Error, Result};

/// Parts, used by one holder at a time.
#[derive(Debug)]
pub(super) struct Parts<P> {
    holder: Holder<P>,
    ranks: Ranks,
}

enum Holder<P> {
    /// One part, used on the caller's thread.
    Caller(Mutex<P>),
    /// A part of each worker.
    Workers(SharedWorkers<Worker>),
}

/// Function that returns a worker's part.
pub(super) type PartOf<P> = fn(&mut Worker) -> Result<&mut P>;

/// Named tensors and texts of a saved state.
pub(super) type State = (Vec<(String, Tensor)>, Metadata);

impl<P> Parts<P> {
    pub(super) fn of_caller(part: P) -> Self {
        Self { holder: Holder::Caller(Mutex::new(part)), ranks: Ranks::alone() }
    }

    pub(super) fn of_workers(pipeline: &Pipeline) -> Self {
        let (workers, ranks) = pipeline.shared();
        Self { holder: Holder::Workers(workers), ranks }
    }

    /// Returns the caller's part; `None` if workers have the parts.
    pub(super) fn of_caller_mut(&mut self) -> Option<&mut P> {
        match &mut self.holder {
            Holder::Caller(part) => Some(part.get_mut().unwrap_or_else(PoisonError::into_inner)),
            Holder::Workers(_) => None,
        }
    }

    /// Waits until no other holder uses the workers.
    ///
    /// # Errors
    /// On a thread of these workers within a step, because the step waits for this thread.
    pub(super) fn lock(&self) -> Result<LockedParts<'_, P>> {
        let holder = match &self.holder {
            Holder::Caller(part) => {
                Locked::Caller(part.lock().unwrap_or_else(PoisonError::into_inner))
            }
            Holder::Workers(workers) => Locked::Workers(workers.lock_outside_step()?),
        };
        Ok(LockedParts { holder, ranks: &self.ranks })
    }
}

impl<P: fmt::Debug> fmt::Debug for Holder<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Caller(part) => part.fmt(f),
            Self::Workers(workers) => workers.fmt(f),
        }
    }
}

/// Parts that no other holder uses at the same time.
pub(super) struct LockedParts<'a, P> {
    pub(super) holder: Locked<'a, P>,
    pub(super) ranks: &'a Ranks,
}

pub(super) enum Locked<'a, P> {
    Caller(MutexGuard<'a, P>),
    Workers(MutexGuard<'a, Workers<Worker>>),
}

impl<P: 'static> LockedParts<'_, P> {
    /// Runs every part's job at the same time; returns all answers, or the first error.
    pub(super) fn each<J: Send + 'static, T: Send + 'static>(
        &mut self,
        jobs: Vec<J>,
        part_of: PartOf<P>,
        f: impl Fn(&mut P, J) -> Result<T> + Clone + Send + 'static,
    ) -> Result<Vec<T>> {
        match &mut self.holder {
            Locked::Caller(part) => jobs.into_iter().map(|job| f(part, job)).collect(),
            Locked::Workers(workers) => {
                workers.each_or_error(jobs, move |worker, job| f(part_of(worker)?, job))
            }
        }
    }

    fn count(&self) -> usize {
        match &self.holder {
            Locked::Caller(_) => 1,
            Locked::Workers(workers) => workers.len(),
        }
    }

    /// Runs `f` on every part; returns all answers, or the first error.
    pub(super) fn all<T: Send + 'static>(
        &mut self,
        part_of: PartOf<P>,
        f: impl Fn(&mut P) -> Result<T> + Clone + Send + 'static,
    ) -> Result<Vec<T>> {
        self.each(vec![(); self.count()], part_of, move |part, ()| f(part))
    }

    /// Gathers the names that each part has, on all ranks.
    pub(super) fn names(
        &mut self,
        what: &str,
        part_of: PartOf<P>,
        names: fn(&P) -> Vec<String>,
    ) -> Result<Vec<Vec<String>>> {
        let here = self.all(part_of, move |part| Ok(names(part)));
        self.ranks.of_workers(what, here)
    }

    /// Returns the names that satisfy `is_chosen`, by part. If no name satisfies it, fails on all ranks with the
    /// error that `none` makes.
    pub(super) fn chosen(
        &self,
        what: &str,
        names: &[Vec<String>],
        is_chosen: impl Fn(&str) -> bool,
        none: impl FnOnce(usize, String) -> Error,
    ) -> Result<Vec<Vec<String>>> {
        let mut chosen = self.ranks.chosen(what, names, is_chosen, none)?;
        // Workers of further replicas in this process own no parameter.
        chosen.resize(self.count(), Vec::new());
        Ok(chosen)
    }

    /// Splits a whole state among the parts of this rank. `names` has the names of all ranks' parts.
    /// `owner_of_tensor` and `owner_of_text` return the name that a tensor or a text belongs to; `None` is for a
    /// text of all parts. A tensor or a text that belongs to no part goes to the first part of this rank, which
    /// then refuses it.
    pub(super) fn split(
        &self,
        names: &[Vec<String>],
        (tensors, metadata): (&[(String, Tensor)], &Metadata),
        owner_of_tensor: fn(&str) -> &str,
        owner_of_text: fn(&str) -> Option<&str>,
    ) -> Vec<State> {
        // Workers of further replicas in this process have a part too, without names.
        let here = if self.ranks.is_alone() { 0..names.len() } else { self.ranks.here() };
        let mut states: Vec<State> = names.iter().map(|_| State::default()).collect();
        let owners: HashMap<&str, usize> = (names.iter().enumerate())
            .flat_map(|(part, names)| names.iter().map(move |name| (name.as_str(), part)))
            .collect();
        let part = |owner: &str| owners.get(owner).copied().unwrap_or(here.start);
        for (name, tensor) in tensors {
            states[part(owner_of_tensor(name))].0.push((name.clone(), tensor.shallow_clone()));
        }
        for (key, text) in metadata {
            let put = |state: &mut State| drop(state.1.insert(key.clone(), text.clone()));
            match owner_of_text(key) {
                Some(owner) => put(&mut states[part(owner)]),
                None => states.iter_mut().for_each(put),
            }
        }
        states.drain(here).collect()
    }

    /// Loads a whole state: all parts read their states before any part takes its state over, so nothing needs an
    /// undo.
    pub(super) fn load<R: Send + 'static, T: Send + 'static>(
        &mut self,
        states: Vec<State>,
        part_of: PartOf<P>,
        read: fn(&mut P, State) -> Result<R>,
        take: fn(&mut P, R) -> T,
    ) -> Result<Vec<T>> {
        let ranks = self.ranks;
        let read = ranks.all_or_none("load state", || self.each(states, part_of, read))?;
        self.each(read, part_of, move |part, read| Ok(take(part, read)))
    }
}
