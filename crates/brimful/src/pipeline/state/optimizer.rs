//! An optimizer whose every part steps on its own stages' thread.

use brimful_torch::foreach;
use tch::Tensor;

use super::saved;
use crate::optim::{self, Method, OptimError, Optimizer};
use crate::pipeline::Pipeline;
use crate::pipeline::error::PipelineError;
use crate::pipeline::home::{HandsOver, HostedStages};
use crate::pipeline::ranks::Ranks;
use crate::pipeline::worker::Worker;
use crate::workers::SharedWorkers;
use crate::{Error, Result};

/// Updates a pipeline's parameters by their gradients.
///
/// It is one optimizer over all parameters: its state has the form of [`Optimizer`]'s, and loads
/// into one, or into a pipeline of any other balance.
#[derive(Debug)]
pub struct PipelineOptimizer {
    pub(crate) workers: SharedWorkers<Worker>,
    pub(crate) ranks: Ranks,
    pub(crate) learning_rate: f64,
}

impl Pipeline {
    /// An optimizer of all parameters, frozen ones included: those are skipped while they are
    /// frozen. It takes the place of an earlier one.
    ///
    /// # Errors
    /// When an option makes no sense.
    pub fn optimizer(&mut self, config: impl Into<Method>) -> Result<PipelineOptimizer> {
        let method = config.into();
        let hands_over = hands_over(self.workers().len(), &self.ranks);
        let make = move |worker: &mut Worker| {
            let owned = worker.variables.owned().filter(|variable| variable.trainable);
            let named = owned.map(|v| (v.name.clone(), v.tensor.shallow_clone())).collect();
            worker.settle()?;
            let mut optimizer = Optimizer::for_named(named, method)?;
            if let Some(homes) = &mut worker.site.homes {
                optimizer.set_homes(|name| homes.home_of(name));
                homes.hands_over = hands_over;
            }
            worker.optimizer = Some(optimizer);
            Ok(())
        };
        self.ranks.all_or_none("optimizer", || self.workers().all(make))?;
        let learning_rate = method.learning_rate();
        let (workers, ranks) = (self.workers.clone(), self.ranks.clone());
        Ok(PipelineOptimizer { workers, ranks, learning_rate })
    }
}

impl PipelineOptimizer {
    /// Gives the parameters whose names satisfy `members` options and a learning rate of their own.
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
        let workers = self.workers.turn()?;
        let names = workers.all(|worker| Ok(names(optimizer(worker)?)));
        let names = self.ranks.of_workers("group", names)?;
        let none = |parameters, first| {
            OptimError::EmptyGroup { group: name.clone(), parameters, first }.into()
        };
        let chosen = self.ranks.chosen("group", &names, members, none)?;
        let has = |chosen: &[String], name: &str| chosen.iter().any(|chosen| chosen == name);
        // Checked on all workers before it is made on one, or a refusal would leave it half made.
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

    /// Takes the weight decay from every parameter of fewer than two dimensions.
    ///
    /// # Errors
    /// As [`Optimizer::decay_only_matrices`].
    pub fn decay_only_matrices(&mut self) -> Result<()> {
        let workers = self.workers.turn()?;
        let check = || workers.all(|worker| optimizer(worker)?.check_no_decay());
        self.ranks.all_or_none("group", check)?;
        let make = || workers.all(|worker| optimizer(worker)?.decay_only_matrices());
        self.ranks.all_or_none("group", make).map(drop)
    }

    /// Updates every parameter that has a gradient, on all devices or on none.
    ///
    /// Of stages that live on the host much of it was computed while the gradients came. What is done to gradients since
    /// counts, unless it goes past their versions (as through [`Tensor::data`]). They are updated behind this call:
    /// who keeps their [`variables`](Pipeline::variables) calls [`wait`](Self::wait) before he looks at them or changes
    /// them.
    ///
    /// # Errors
    /// As [`Optimizer::step`].
    pub fn step(&mut self) -> Result<()> {
        let workers = self.workers.turn()?;
        let prepare = || workers.all(|worker| optimizer(worker)?.prepare());
        let plans = self.ranks.all_or_none("optimizer step", prepare)?;
        // Copies of shared variables follow before the next step: nothing that may fail comes after.
        workers.each_or_error(plans, |worker, plan| worker.update(plan)).map(drop)
    }

    /// Waits until the updates of the last step are done. Stages that live on the host are updated
    /// while the next step begins; calls that read, save or evaluate wait by themselves, but tensors that somebody has
    /// kept from an earlier [`Pipeline::variables`] are written to until then.
    ///
    /// # Errors
    /// With what an update failed with.
    pub fn wait(&mut self) -> Result<()> {
        self.workers.turn()?.all(|worker| worker.settle()).map(drop)
    }

    /// Lets the updates of stages that live on the host follow the backward, stage by stage, instead of
    /// coming after it: they are hidden behind the rest of the backward, and [`step`](Self::step)
    /// updates what lives on the device alone. Parameters then have no gradient to read or clip.
    ///
    /// A step that fails after the first update cannot be taken back:
    /// [`PartlyUpdated`](crate::pipeline::PipelineError::PartlyUpdated) says so, and the way back is
    /// the model that was saved last. It is for losses whose denominator is known beforehand
    /// ([`Loss::mean`](crate::Loss::mean)), in a pipeline on one device; losses that are not finite are refused before
    /// the first update, gradients before their stage's. Actions of one's own that end a stage's
    /// backward before a later one's that shares its parameters are refused by the step.
    ///
    /// # Errors
    /// When the pipeline has several devices, replicas or ranks.
    pub fn follow_backward(&mut self, follow: bool) -> Result<()> {
        let workers = self.workers.turn()?;
        let hands_over = match (follow, hands_over(workers.len(), &self.ranks)) {
            (true, HandsOver::AtTheStep) => return Err(PipelineError::FollowsParts.into()),
            (true, _) => HandsOver::Following,
            (false, at_first) => at_first,
        };
        let set = workers.all(move |worker| {
            if follow {
                // Who has room to look ahead has no reason to follow.
                optimizer(worker)?.drop_ahead();
            }
            if let Some(homes) = &mut worker.site.homes {
                homes.hands_over = hands_over;
            }
            Ok(())
        });
        set.map(drop)
    }

    /// Leaves every parameter without a gradient.
    ///
    /// # Errors
    /// When a worker has ended.
    pub fn zero_grad(&mut self) -> Result<()> {
        let workers = self.workers.turn()?;
        saved::zero_grad(&workers)
    }

    /// Scales all gradients, of all stages, down together where their 2-norm exceeds `max_norm`.
    /// Gives the norm that they had, for which the host waits.
    ///
    /// # Errors
    /// As [`clip_gradient_norm`](crate::optim::clip_gradient_norm); and where updates
    /// [follow the backward](Self::follow_backward).
    pub fn clip_gradient_norm(&mut self, max_norm: f64) -> Result<f64> {
        let workers = self.workers.turn()?;
        let norms = workers.all(move |worker| {
            optim::check_max_norm(max_norm)?;
            let homes = worker.site.homes.as_ref();
            if let stages @ 1.. = homes.map_or(0, HostedStages::without_gradients) {
                return Err(PipelineError::FollowsClipped { stages }.into());
            }
            let gradients = gradients(optimizer(worker)?);
            let norm = (!gradients.is_empty()).then(|| foreach::norm(&gradients)).transpose()?;
            let parameters = optimizer(worker)?.parameters().count();
            Ok((parameters, norm.map(|norm| norm.f_double_value(&[])).transpose()?))
        });
        let norms = self.ranks.of_workers("clip", norms)?;
        let parameters = norms.iter().map(|(count, _)| count).sum();
        if norms.iter().all(|(_, norm)| norm.is_none()) {
            return Err(OptimError::NoGradient { parameters }.into());
        }
        let norm = norms.iter().filter_map(|(_, norm)| *norm).fold(0.0, f64::hypot);
        let factor = optim::clip_factor(norm, max_norm);
        let scale = move |worker: &mut Worker| match &*gradients(optimizer(worker)?) {
            [] => Ok(()),
            gradients => Ok(foreach::scale(gradients, factor)?),
        };
        self.ranks.all_or_none("clip", || workers.all(scale))?;
        Ok(norm)
    }

    /// The learning rate of the parameters that are in no group of their own.
    pub fn learning_rate(&self) -> f64 {
        self.learning_rate
    }

    /// Sets the learning rate of every group.
    ///
    /// # Errors
    /// When it is negative or not finite; the old ones stay then.
    pub fn set_learning_rate(&mut self, rate: f64) -> Result<()> {
        optim::check_rate(rate)?;
        self.workers.turn()?.all(move |worker| {
            // One that is at work takes it then; nobody has to wait for that.
            let homes = worker.site.homes.as_mut();
            match homes.is_some_and(|homes| homes.give_rate(rate)) {
                true => Ok(()),
                false => optimizer(worker)?.set_learning_rate(rate),
            }
        })?;
        self.learning_rate = rate;
        Ok(())
    }

    /// Sets the learning rate of one group.
    ///
    /// # Errors
    /// When there is no such group, or the rate is negative or not finite.
    pub fn set_group_learning_rate(&mut self, group: &str, rate: f64) -> Result<()> {
        // A worker none of whose parameters is in the group does not know it.
        let workers = self.workers.turn()?;
        let jobs = vec![group.to_owned(); workers.len()];
        let answers = workers.each(jobs, move |worker, group| {
            optimizer(worker)?.set_group_learning_rate(&group, rate)
        });
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

/// When an optimizer of so many workers gets gradients, unless it is said: what others are still to add to
/// must not be looked ahead from.
fn hands_over(workers: usize, ranks: &Ranks) -> HandsOver {
    match (workers, ranks.world().size()) {
        (1, 1) => HandsOver::Ahead,
        _ => HandsOver::AtTheStep,
    }
}

/// The worker's part of the optimizer, once its last update is done.
pub(crate) fn optimizer(worker: &mut Worker) -> Result<&mut Optimizer> {
    worker.settle()?;
    Ok(worker.optimizer.as_mut().expect("it was made on every worker"))
}

pub(crate) fn names(optimizer: &Optimizer) -> Vec<String> {
    optimizer.parameters().map(|(name, _)| name.to_owned()).collect()
}

fn gradients(optimizer: &Optimizer) -> Vec<Tensor> {
    let all = optimizer.parameters().map(|(_, tensor)| tensor.grad());
    all.filter(Tensor::defined).collect()
}
