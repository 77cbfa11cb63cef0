//! Variables of all stages under the layers' own names: access, freezing, saving and loading.
//!
//! A saved model does not depend on the balance: it loads into any other balance, and into the plain
//! model's `VarStore`.

use std::collections::BTreeMap;
use std::path::Path;

use tch::Tensor;

use crate::Result;
use crate::pipeline::Pipeline;
use crate::pipeline::error::PipelineError;
use crate::pipeline::ranks::shared;
use crate::pipeline::worker::{Variable, Worker};
use crate::save::{self, Metadata};
use crate::workers::Workers;

impl Pipeline {
    /// Returns all variables with their names, in the order of the names, each on its stage's device. A shared
    /// variable appears once. The tensors are the stages' own: changing a tensor changes the model, and the next
    /// step copies the change to every copy of a shared variable, in other stages and ranks too. Writes through
    /// [`Tensor::data`] are not noticed, because libtorch does not count them as changes. Such a write to an
    /// offloaded stage may be lost, because a step leaves the weights of one stage on the device for the next
    /// step. To keep such writes, call `variables` or [`Optimizer::wait`](crate::optim::Optimizer::wait) after
    /// them.
    ///
    /// Waits for the last update. Later updates and steps write to the variables of offloaded stages while the
    /// caller goes on: a caller that keeps the tensors must call
    /// [`Optimizer::wait`](crate::optim::Optimizer::wait) after every optimizer step, before it reads them.
    ///
    /// In a world, all ranks make this call. Rank 0 gets all variables, those of other ranks as copies. Every
    /// other rank gets its own variables.
    ///
    /// # Errors
    /// When a worker has ended.
    pub fn variables(&self) -> Result<Vec<(String, Tensor)>> {
        self.ranks.gather(owned(&self.workers(), |variable| variable.tensor.shallow_clone()))
    }

    /// Returns the gradients of all parameters that have one, with their names; in a world, on rank 0 as
    /// with [`Pipeline::variables`].
    ///
    /// # Errors
    /// When a worker has ended.
    pub fn gradients(&self) -> Result<Vec<(String, Tensor)>> {
        let mut own = owned(&self.workers(), |variable| variable.tensor.grad());
        let all = own.iter_mut().flatten();
        all.for_each(|own| own.retain(|(_, gradient)| gradient.defined()));
        self.ranks.gather(own)
    }

    /// Removes every parameter's gradient, as the optimizer's call does.
    ///
    /// # Errors
    /// When a worker has ended.
    pub fn zero_grad(&mut self) -> Result<()> {
        self.workers().all(|worker| worker.variables.zero_grad()).map(drop)
    }

    /// Freezes the parameters whose names satisfy `which`: they get no gradients, and optimizers skip them.
    ///
    /// # Errors
    /// When no name satisfies `which`.
    pub fn freeze(&mut self, which: impl Fn(&str) -> bool) -> Result<()> {
        self.set_trained(false, which)
    }

    /// Unfreezes the parameters whose names satisfy `which`.
    ///
    /// # Errors
    /// When no name satisfies `which`.
    pub fn unfreeze(&mut self, which: impl Fn(&str) -> bool) -> Result<()> {
        self.set_trained(true, which)
    }

    /// Writes all variables to a safetensors file, atomically. In a world, all ranks make this call, and rank 0
    /// writes the file.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let all = self.variables()?;
        self.ranks.on_first("save", || save::write(path, &all, &Metadata::new()))
    }

    /// Reads all variables from a file that a pipeline of any balance, a plain model or the program saved.
    /// Skips an optimizer's state, averages, and PyTorch's counts of batches in it. In a world, every rank
    /// reads the file.
    ///
    /// # Errors
    /// When the file cannot be read, or its variables differ from the model's, which the error lists;
    /// nothing has then changed.
    pub fn load(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let (variables, _) = self.ranks.all_or_none("load", || save::read(path))?;
        self.set_variables(variables)
    }

    /// Sets all variables to these values; skips the same tensors as [`Pipeline::load`].
    ///
    /// # Errors
    /// When their names or shapes differ from the model's; nothing is changed then. If memory runs out or a
    /// worker has ended, some variables have new values and some old: set them again. In a world, all ranks
    /// get either error.
    pub fn set_variables(&mut self, values: Vec<(String, Tensor)>) -> Result<()> {
        let workers = self.workers();
        let form = |(name, tensor): (String, Tensor)| (name, tensor.size());
        let here = owned(&workers, |variable| variable.tensor.shallow_clone());
        let here = here.map(|here| here.into_iter().flatten().map(form).collect());
        let here = self.ranks.of_workers("variables", here)?;
        // Changes nothing on any rank if the values do not fit on one of them.
        self.ranks.all_or_none("set variables", || check(here, &values))?;
        let jobs = (0..workers.len()).map(|_| shared(&values)).collect();
        let set = || workers.each_or_error(jobs, |worker, values| worker.variables.set(&values));
        self.ranks.all_or_none("set variables", set).map(drop)
    }

    fn set_trained(&mut self, trained: bool, which: impl Fn(&str) -> bool) -> Result<()> {
        let workers = self.workers();
        let names = workers
            .all(|worker| Ok(worker.variables.all().map(|v| v.name.clone()).collect::<Vec<_>>()));
        let names = self.ranks.of_workers("freeze", names)?;
        let none = |variables, first| PipelineError::NoSuchVariable { variables, first }.into();
        let chosen = self.ranks.chosen("freeze", &names, which, none)?;
        let set = move |worker: &mut Worker, chosen: Vec<String>| {
            worker.offload_all()?;
            for v in worker.variables.all().filter(|v| v.trainable && chosen.contains(&v.name)) {
                let _itself = v.tensor.f_set_requires_grad(trained)?;
            }
            worker.variables.compare_anew();
            Ok(())
        };
        self.ranks.all_or_none("freeze", || workers.each_or_error(chosen, set)).map(drop)
    }
}

/// Applies `of` to every variable that is not a copy, by worker.
fn owned(
    workers: &Workers<Worker>,
    of: fn(&Variable) -> Tensor,
) -> Result<Vec<Vec<(String, Tensor)>>> {
    workers.all(move |worker| {
        worker.offload_all()?;
        let owned = worker.variables.owned();
        Ok(owned.map(|v| (v.name.clone(), of(v))).collect())
    })
}

/// Prefixes of the tensors beside the model in the program's own files.
const BESIDE_THE_MODEL: [&str; 2] = ["optimizer.", "ema."];
/// Name under which PyTorch's BatchNorm counts its batches; this library does not use the count.
const BATCH_COUNT: &str = "num_batches_tracked";

/// Returns whether a file may hold a tensor of this name that is not in the model.
fn is_passed_over(name: &str) -> bool {
    name.ends_with(BATCH_COUNT) || BESIDE_THE_MODEL.iter().any(|start| name.starts_with(start))
}

/// Fails unless the values are for exactly these variables, besides skipped ones.
fn check(here: Vec<(String, Vec<i64>)>, saved: &[(String, Tensor)]) -> Result<()> {
    let here: BTreeMap<String, Vec<i64>> = here.into_iter().collect();
    let saved: BTreeMap<String, Vec<i64>> =
        saved.iter().map(|(name, tensor)| (name.clone(), tensor.size())).collect();
    let describe = |shape: Option<&Vec<i64>>| {
        shape.map_or("missing".to_owned(), |shape| format!("of shape {shape:?}"))
    };
    let differs = |name: &&String| {
        here.get(*name) != saved.get(*name) && (here.contains_key(*name) || !is_passed_over(name))
    };
    let left_over = saved.keys().filter(|name| !here.contains_key(*name));
    let differences = here.keys().chain(left_over).filter(differs).map(|name| {
        let (saved, here) = (describe(saved.get(name)), describe(here.get(name)));
        format!("'{name}' is {saved} in the file, but {here} in the model")
    });
    let differences: Vec<String> = differences.collect();
    match differences.is_empty() {
        true => Ok(()),
        false => Err(PipelineError::Mismatch { differences }.into()),
    }
}
