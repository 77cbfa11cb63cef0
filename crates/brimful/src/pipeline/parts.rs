//! Each worker's part of an optimizer and of averages. `optim` combines the parts into one optimizer or average.

use brimful_torch::foreach;
use tch::Tensor;

use crate::Result;
use crate::pipeline::Pipeline;
use crate::pipeline::error::PipelineError;
use crate::pipeline::offload::OffloadedStages;
use crate::pipeline::ranks::Ranks;
use crate::pipeline::worker::Worker;
use crate::update::{
    EmaPart, GradientNorm, Method, OptimError, OptimizerPart, check_decay, check_max_norm,
    clip_factor,
};
use crate::workers::{SharedWorkers, Workers};

impl Pipeline {
    /// Returns the workers and ranks, for parts of an optimizer or of averages.
    pub(crate) fn shared(&self) -> (SharedWorkers<Worker>, Ranks) {
        (self.workers.clone(), self.ranks.clone())
    }

    /// Makes each worker's part of an optimizer of the parameters that the worker owns. If a part cannot be made,
    /// all workers keep the parts of an earlier optimizer.
    pub(crate) fn make_optimizers(&self, method: Method) -> Result<()> {
        let make = move |worker: &mut Worker| {
            let owned = worker.variables.owned().filter(|variable| variable.trainable);
            let named = owned.map(|v| (v.name.clone(), v.tensor.shallow_clone())).collect();
            worker.offload_all()?;
            OptimizerPart::of_named(named, method)
        };
        let take = |worker: &mut Worker, mut optimizer: OptimizerPart| {
            if let Some(offloaded) = &mut worker.site.offloaded {
                optimizer.set_offloaded(|name| offloaded.offload_of(name));
                offloaded.forget_states();
            }
            worker.site.optimizer = Some(optimizer);
            Ok(())
        };
        let workers = self.workers();
        let parts = self.ranks.all_or_none("optimizer", || workers.all(make))?;
        workers.each_or_error(parts, take).map(drop)
    }

    /// Makes each worker's part of averages of the variables that the worker owns. If a part cannot be made, all
    /// workers keep the parts of earlier averages.
    pub(crate) fn make_averages(&self, decay: f64) -> Result<()> {
        let make = |worker: &mut Worker| {
            worker.offload_all()?;
            let owned = worker.variables.owned();
            let named = owned.map(|v| (v.name.clone(), v.tensor.shallow_clone())).collect();
            let offloaded = worker.site.offloaded.as_ref();
            let arena = |name: &str| offloaded?.offload_of(name)?.arena;
            EmaPart::new(named, arena)
        };
        let take = |worker: &mut Worker, averages: EmaPart| {
            worker.ema = Some(averages);
            Ok(())
        };
        let workers = self.workers();
        // The check is inside the vote, so that all ranks get the error of any rank.
        let make = || check_decay(decay).and_then(|()| workers.all(make));
        let parts = self.ranks.all_or_none("averages", make)?;
        workers.each_or_error(parts, take).map(drop)
    }
}

/// Finishes waiting updates, and returns the worker's part of the optimizer, to read or replace its state.
pub(crate) fn settled_optimizer(worker: &mut Worker) -> Result<&mut OptimizerPart> {
    worker.offload_all()?;
    made_optimizer(worker)
}

/// Returns the worker's part of the optimizer. Updates of its last step may still wait.
pub(crate) fn made_optimizer(worker: &mut Worker) -> Result<&mut OptimizerPart> {
    Ok(worker.site.optimizer.as_mut().expect("it was made on every worker"))
}

/// Finishes waiting updates of the weights, and returns the worker's part of the averages.
pub(crate) fn settled_ema(worker: &mut Worker) -> Result<&mut EmaPart> {
    worker.offload_all()?;
    Ok(worker.ema.as_mut().expect("it was made on every worker"))
}

/// Clips the gradients of all stages together. Returns their norm before clipping.
pub(crate) fn clip_worker_gradients(
    workers: &Workers<Worker>,
    ranks: &Ranks,
    max_norm: f64,
) -> Result<GradientNorm> {
    let norms = workers.all(move |worker| {
        check_max_norm(max_norm)?;
        let offloaded = worker.site.offloaded.as_ref();
        if let stages @ 1.. = offloaded.map_or(0, OffloadedStages::without_gradients) {
            return Err(PipelineError::ClippedInBackward { stages }.into());
        }
        let gradients = gradients(worker)?;
        let norm = (!gradients.is_empty()).then(|| foreach::norm(&gradients)).transpose()?;
        let parameters = made_optimizer(worker)?.parameters().count();
        Ok((parameters, norm.map(|norm| norm.f_double_value(&[])).transpose()?))
    });
    let norms = ranks.of_workers("clip", norms)?;
    let parameters = norms.iter().map(|(count, _)| count).sum();
    if norms.iter().all(|(_, norm)| norm.is_none()) {
        return Err(OptimError::NoGradient { parameters }.into());
    }
    let norm = norms.iter().filter_map(|(_, norm)| *norm).fold(0.0, f64::hypot);
    let factor = clip_factor(norm, max_norm);
    let scale = move |worker: &mut Worker| match &*gradients(worker)? {
        [] => Ok(()),
        gradients => Ok(foreach::scale(gradients, factor)?),
    };
    ranks.all_or_none("clip", || workers.all(scale))?;
    Ok(GradientNorm::of(norm))
}

/// Finishes waiting updates, and returns the gradients of the worker's parameters.
fn gradients(worker: &mut Worker) -> Result<Vec<Tensor>> {
    worker.finish_updates()?;
    let all = made_optimizer(worker)?.parameters().map(|(_, tensor)| tensor.grad());
    Ok(all.filter(Tensor::defined).collect())
}
