//! Optimizer whose parts run on their stages' threads.

use brimful_torch::foreach;
use tch::Tensor;

use super::saved;
use crate::optim::{self, Method, OptimError, Optimizer};
use crate::pipeline::Pipeline;
use crate::pipeline::error::PipelineError;
use crate::pipeline::offload::OffloadedStages;
use crate::pipeline::ranks::Ranks;
use crate::pipeline::worker::Worker;
use crate::workers::SharedWorkers;
use crate::{Error, Result};

/// Optimizer of a pipeline's parameters.
///
/// It acts as one optimizer over all parameters: its state has the form of [`Optimizer`]'s, and loads into
/// one, or into a pipeline of any other balance.
#[derive(Debug)]
pub struct PipelineOptimizer {
    pub(crate) workers: SharedWorkers<Worker>,
    pub(crate) ranks: Ranks,
    pub(crate) learning_rate: f64,
}

impl Pipeline {
    /// Makes an optimizer of all parameters, including frozen ones, which it skips while they are frozen.
    /// It replaces an earlier one.
    ///
    /// # Errors
    /// When an option makes no sense.
    pub fn optimizer(&mut self, config: impl Into<Method>) -> Result<PipelineOptimizer> {
        let method = config.into();
        let make = move |worker: &mut Worker| {
            let owned = worker.variables.owned().filter(|variable| variable.trainable);
            let named = owned.map(|v| (v.name.clone(), v.tensor.shallow_clone())).collect();
            worker.offload_all()?;
            let mut optimizer = Optimizer::for_named(named, method)?;
            if let Some(offloaded) = &mut worker.site.offloaded {
                optimizer.set_offloaded(|name| offloaded.offload_of(name));
                offloaded.forget_states();
            }
            worker.site.optimizer = Some(optimizer);
            Ok(())
        };
        self.ranks.all_or_none("optimizer", || self.workers().all(make))?;
        let learning_rate = method.learning_rate();
        let (workers, ranks) = (self.workers.clone(), self.ranks.clone());
        Ok(PipelineOptimizer { workers, ranks, learning_rate })
    }
}

impl PipelineOptimizer {
    /// Gives the parameters whose names satisfy `members` their own options and learning rate.
    ///
    /// # Errors
    /// As [`Optimizer::group`].
    pub fn group(
        &mut self,
        name: &str,
        members: impl Fn(&str) -> bool,
        config: impl Into<Method>,
    ) -> Result<()> {
        let (name, method) = (name.to_owned(), config.into());
        let workers = self.workers.lock_outside_step()?;
        let names = workers.all(|worker| Ok(names(optimizer(worker)?)));
        let names = self.ranks.of_workers("group", names)?;
        let none = |parameters, first| {
            OptimError::EmptyGroup { group: name.clone(), parameters, first }.into()
        };
        let chosen = self.ranks.chosen("group", &names, members, none)?;
        let has = |chosen: &[String], name: &str| chosen.iter().any(|chosen| chosen == name);
        // All workers check the group before one makes it: a refusal would otherwise leave it half made.
        self.ranks.all_or_none("group", || {
            let group = name.clone();
            workers.each_or_error(chosen.clone(), move |worker, chosen| {
                optimizer(worker)?.check_group(&group, |name| has(&chosen, name), &method)
            })
        })?;
        let make = move |worker: &mut Worker, chosen: Vec<String>| match &*chosen {
            [] => Ok(()),
            chosen => optimizer(worker)?.group(&name, |name| has(chosen, name), method),
        };
        self.ranks.all_or_none("group", || workers.each_or_error(chosen, make)).map(drop)
    }

    /// Disables weight decay for every parameter of fewer than two dimensions.
    ///
    /// # Errors
    /// As [`Optimizer::decay_only_matrices`].
    pub fn decay_only_matrices(&mut self) -> Result<()> {
        let workers = self.workers.lock_outside_step()?;
        let check = || workers.all(|worker| optimizer(worker)?.check_no_decay());
        self.ranks.all_or_none("weight decay", check)?;
        let make = || workers.all(|worker| optimizer(worker)?.decay_only_matrices());
        self.ranks.all_or_none("weight decay", make).map(drop)
    }

    /// Updates every parameter that has a gradient, on all devices or on none. Does nothing if they were updated [in
    /// the backward](crate::pipeline::Builder::update_in_backward).
    ///
    /// An offloaded stage is updated when its weights are fetched the next time. Reading, saving and evaluating
    /// finish the updates first, but a caller that keeps [`variables`](Pipeline::variables) or gradients must call
    /// [`wait`](Self::wait) before it reads or changes them.
    ///
    /// # Errors
    /// As [`Optimizer::step`].
    pub fn step(&mut self) -> Result<()> {
        let workers = self.workers.lock_outside_step()?;
        let prepare = || workers.all(Worker::prepare_update);
        let plans = self.ranks.all_or_none("optimizer step", prepare)?;
        // Copies of shared variables follow before the next step, not here: after an update nothing may
        // fail.
        workers.each_or_error(plans, |worker, plan| worker.update(plan)).map(drop)
    }

    /// Finishes the updates of the last step, which offloaded stages otherwise take when they are fetched the next
    /// time.
    ///
    /// # Errors
    /// Returns the error of a failed update.
    pub fn wait(&mut self) -> Result<()> {
        self.workers.lock_outside_step()?.all(Worker::offload_all).map(drop)
    }

    /// Removes every parameter's gradient.
    ///
    /// # Errors
    /// When a worker has ended.
    pub fn zero_grad(&mut self) -> Result<()> {
        let workers = self.workers.lock_outside_step()?;
        saved::zero_grad(&workers)
    }

    /// Clips the gradients of all stages together to the L2 norm `max_norm`. Returns their norm before
    /// clipping, which the host waits for.
    ///
    /// # Errors
    /// As [`clip_gradient_norm`](crate::optim::clip_gradient_norm); and with updates in the backward
    /// ([`update_in_backward`](crate::pipeline::Builder::update_in_backward)).
    pub fn clip_gradient_norm(&mut self, max_norm: f64) -> Result<f64> {
        let workers = self.workers.lock_outside_step()?;
        let norms = workers.all(move |worker| {
            optim::check_max_norm(max_norm)?;
            let offloaded = worker.site.offloaded.as_ref();
            if let stages @ 1.. = offloaded.map_or(0, OffloadedStages::without_gradients) {
                return Err(PipelineError::ClippedInBackward { stages }.into());
            }
            let gradients = gradients(with_gradients(worker)?);
            let norm = (!gradients.is_empty()).then(|| foreach::norm(&gradients)).transpose()?;
            let parameters = made(worker).parameters().count();
            Ok((parameters, norm.map(|norm| norm.f_double_value(&[])).transpose()?))
        });
        let norms = self.ranks.of_workers("clip", norms)?;
        let parameters = norms.iter().map(|(count, _)| count).sum();
        if norms.iter().all(|(_, norm)| norm.is_none()) {
            return Err(OptimError::NoGradient { parameters }.into());
        }
        let norm = norms.iter().filter_map(|(_, norm)| *norm).fold(0.0, f64::hypot);
        let factor = optim::clip_factor(norm, max_norm);
        let scale = move |worker: &mut Worker| match &*gradients(with_gradients(worker)?) {
            [] => Ok(()),
            gradients => Ok(foreach::scale(gradients, factor)?),
        };
        self.ranks.all_or_none("clip", || workers.all(scale))?;
        Ok(norm)
    }

    /// Returns the learning rate of parameters without a group of their own.
    pub fn learning_rate(&self) -> f64 {
        self.learning_rate
    }

    /// Sets the learning rate of every group.
    ///
    /// # Errors
    /// When it is negative or not finite; the old rates then stay.
    pub fn set_learning_rate(&mut self, rate: f64) -> Result<()> {
        optim::check_rate(rate)?;
        self.workers.lock_outside_step()?.all(move |worker| {
            // Waiting updates keep the rate of their step.
            made(worker).set_learning_rate(rate)
        })?;
        self.learning_rate = rate;
        Ok(())
    }

    /// Sets the learning rate of one group.
    ///
    /// # Errors
    /// When there is no such group, or the rate is negative or not finite.
    pub fn set_group_learning_rate(&mut self, group: &str, rate: f64) -> Result<()> {
        // A worker does not know a group that has none of its parameters.
        let workers = self.workers.lock_outside_step()?;
        let jobs = vec![group.to_owned(); workers.len()];
        let answers = workers
            .each(jobs, move |worker, group| made(worker).set_group_learning_rate(&group, rate));
        let is_known =
            |answer: &Result<()>| !matches!(answer, Err(Error::Optim(OptimError::NoGroup { .. })));
        let here = answers.as_ref().map_err(Error::clone);
        let here = here.map(|answers| vec![answers.iter().any(is_known)]);
        let anywhere = self.ranks.of_workers("learning rate", here)?;
        let (known, unknown): (Vec<_>, Vec<_>) = answers?.into_iter().partition(is_known);
        match unknown.into_iter().next() {
            Some(error) if !anywhere.contains(&true) => error?,
            _ => known.into_iter().collect::<Result<()>>()?,
        }
        if group == optim::DEFAULT_GROUP {
            self.learning_rate = rate;
        }
        Ok(())
    }
}

/// Returns the worker's part of the optimizer, after its last update, to read or replace its state.
pub(crate) fn optimizer(worker: &mut Worker) -> Result<&mut Optimizer> {
    worker.offload_all()?;
    Ok(made(worker))
}

/// Returns the worker's part of the optimizer, after its last update, to read or scale gradients.
fn with_gradients(worker: &mut Worker) -> Result<&mut Optimizer> {
    worker.finish_updates()?;
    Ok(made(worker))
}

/// Returns the worker's part of the optimizer, whose last step may still wait.
fn made(worker: &mut Worker) -> &mut Optimizer {
    worker.site.optimizer.as_mut().expect("it was made on every worker")
}

pub(crate) fn names(optimizer: &Optimizer) -> Vec<String> {
    optimizer.parameters().map(|(name, _)| name.to_owned()).collect()
}

fn gradients(optimizer: &Optimizer) -> Vec<Tensor> {
    let all = optimizer.parameters().map(|(_, tensor)| tensor.grad());
    all.filter(Tensor::defined).collect()
}
