//! Exponential moving averages of a pipeline's weights, each in the memory of its stage.

use tch::Tensor;

use crate::Result;
use crate::optim::{Ema, OptimError};
use crate::pipeline::Pipeline;
use crate::pipeline::ranks::Ranks;
use crate::pipeline::worker::Worker;
use crate::save::Metadata;
use crate::workers::SharedWorkers;

/// Averages of a pipeline's variables. Their state has the form of an [`Ema`] of all variables, and loads
/// into one, or into a pipeline of any other balance. In a world, all ranks make every call.
#[derive(Debug)]
pub struct PipelineEma {
    workers: SharedWorkers<Worker>,
    ranks: Ranks,
}

impl Pipeline {
    /// Makes averages of all variables, which start at the current values, in the memory of their stages.
    /// They replace earlier ones.
    ///
    /// # Errors
    /// As [`Ema::new`].
    pub fn ema(&mut self, decay: f64) -> Result<PipelineEma> {
        let workers = self.workers();
        self.ranks.all_or_none("averages", || {
            workers.all(move |worker| {
                worker.offload_all()?;
                let owned = worker.variables.owned();
                let named = owned.map(|v| (v.name.clone(), v.tensor.shallow_clone())).collect();
                let offloaded = worker.site.offloaded.as_ref();
                let arena = |name: &str| offloaded?.offload_of(name)?.arena;
                worker.ema = Some(Ema::with_offload(named, decay, arena)?);
                Ok(())
            })
        })?;
        drop(workers);
        Ok(PipelineEma { workers: self.workers.clone(), ranks: self.ranks.clone() })
    }
}

impl PipelineEma {
    /// Starts with a smaller decay, as [`Ema::warmup`].
    ///
    /// # Errors
    /// When a worker has ended.
    pub fn warmup(self, warmup: bool) -> Result<Self> {
        self.workers.lock_outside_step()?.all(move |worker| {
            ema(worker)?.set_warmup(warmup);
            Ok(())
        })?;
        Ok(self)
    }

    /// Updates the averages by the current weights, on all devices or on none.
    ///
    /// # Errors
    /// As [`Ema::update`].
    pub fn update(&mut self) -> Result<()> {
        let workers = self.workers.lock_outside_step()?;
        let prepare = || workers.all(|worker| ema(worker)?.prepare());
        let scratch = self.ranks.all_or_none("update averages", prepare)?;
        workers.each_or_error(scratch, |worker, scratch| ema(worker)?.commit(&scratch)).map(drop)
    }

    /// Replaces the model's weights by the averages, on all devices or on none.
    ///
    /// # Errors
    /// As [`Ema::swap_in`].
    pub fn swap_in(&mut self) -> Result<()> {
        let workers = self.workers.lock_outside_step()?;
        let swap = || workers.all(|worker| ema(worker)?.swap_in());
        let swapped = self.ranks.all_or_none("swap averages in", swap);
        if swapped.is_err() {
            workers.all(|worker| ema(worker)?.swap_out())?;
        }
        swapped.map(drop)
    }

    /// Restores the model's own weights, bit by bit.
    ///
    /// # Errors
    /// As [`Ema::swap_out`].
    pub fn swap_out(&mut self) -> Result<()> {
        self.workers.lock_outside_step()?.all(|worker| ema(worker)?.swap_out()).map(drop)
    }

    /// Returns the whole state in the form of [`Ema::state`]. In a world, rank 0 gets all of it, the others
    /// their own parts.
    ///
    /// # Errors
    /// When a worker has ended.
    pub fn state(&self) -> Result<(Vec<(String, Tensor)>, Metadata)> {
        let parts = self.workers.lock_outside_step()?.all(|worker| Ok(ema(worker)?.state()));
        // All workers have the same metadata.
        let mut texts = Metadata::new();
        let tensors = parts.map(|parts| {
            let (tensors, mut metadata): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
            texts = metadata.swap_remove(0);
            tensors
        });
        Ok((self.ranks.gather(tensors)?, texts))
    }

    /// Loads a state of [`PipelineEma::state`] or [`Ema::state`].
    ///
    /// # Errors
    /// As [`Ema::load_state`]; nothing is changed then.
    pub fn load_state(&mut self, tensors: &[(String, Tensor)], metadata: &Metadata) -> Result<()> {
        let workers = self.workers.lock_outside_step()?;
        let names = workers.all(|worker| Ok(names(ema(worker)?)));
        let names = self.ranks.of_workers("load averages", names)?;
        let mut parts = self.ranks.all_or_none("load averages", || portions(&names, tensors))?;
        let parts = parts.drain(self.ranks.here());
        let jobs = parts.map(|part| (part, metadata.clone())).collect();
        // All workers read the state before one takes it over, so nothing needs an undo.
        let read = self.ranks.all_or_none("load averages", || {
            workers.each_or_error(jobs, |worker, (tensors, metadata): (Vec<_>, Metadata)| {
                ema(worker)?.read_state(&tensors, &metadata)
            })
        })?;
        let taken = workers.each_or_error(read, |worker, read| {
            ema(worker)?.take_state(read);
            Ok(())
        });
        taken.map(drop)
    }
}

/// Returns the worker's part of the averages, after the weights' last update.
fn ema(worker: &mut Worker) -> Result<&mut Ema> {
    worker.offload_all()?;
    Ok(worker.ema.as_mut().expect("it was made on every worker"))
}

fn names(ema: &Ema) -> Vec<String> {
    ema.averages().map(|(name, _)| name.to_owned()).collect()
}

/// Splits all averages by worker; fails if one belongs to no worker.
fn portions(
    names: &[Vec<String>],
    tensors: &[(String, Tensor)],
) -> Result<Vec<Vec<(String, Tensor)>>> {
    let mut parts: Vec<Vec<(String, Tensor)>> = names.iter().map(|_| Vec::new()).collect();
    for (name, tensor) in tensors {
        let Some(worker) = names.iter().position(|names| names.contains(name)) else {
            let (saved, here) = ("there".into(), "missing".into());
            return Err(OptimError::AveragesMismatch { name: name.clone(), saved, here }.into());
        };
        parts[worker].push((name.clone(), tensor.shallow_clone()));
    }
    Ok(parts)
}
