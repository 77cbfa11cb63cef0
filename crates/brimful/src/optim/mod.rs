//! Optimizers: one pass over the memory of all parameters, atomic steps, and a state that can be saved.
//!
//! ```
//! use brimful::optim::{AdamW, Optimizer};
//! use tch::{Device, Kind, Tensor, nn, nn::Module};
//!
//! let vs = nn::VarStore::new(Device::Cpu);
//! let model = nn::linear(vs.root() / "layer", 4, 2, Default::default());
//! let mut opt = Optimizer::new(&vs, AdamW::new(1e-3).weight_decay(0.1))?;
//! opt.decay_only_matrices()?;
//!
//! let x = Tensor::ones([8, 4], (Kind::Float, Device::Cpu));
//! model.forward(&x).square().mean(Kind::Float).backward();
//! opt.step()?;
//! opt.zero_grad()?;
//! # Ok::<(), brimful::Error>(())
//! ```
//!
//! *Atomic.* A step allocates all the memory that it needs before it changes anything. A step that runs out of
//! memory leaves parameters, state and step counters unchanged.
//!
//! *Half precision.* Updates go to f32 masters: bf16 has 8 significant bits, and most of a small update would be
//! rounded away. A bf16 parameter is the upper half of its master, so its state has only the lower 16 bits. The
//! state of an f16 parameter has the whole master. Averages are in f32 unless a [`StateFormat`] says otherwise.
//!
//! *Pipelines.* [`Pipeline::optimizer`] and [`Pipeline::ema`] return the same types. Each worker has the part of
//! its own stages, and a saved state does not depend on the balance: the state of a pipeline's optimizer loads
//! into an optimizer of the plain model or of a pipeline with any other balance, and the reverse. In a world, all
//! ranks make every call.
//!
//! *tch's optimizers* can be used instead for a model in a `VarStore`, because they too read the gradients from
//! the parameters.

mod ema;
mod parts;
mod saved;

use std::collections::HashSet;

use tch::{Tensor, nn};

pub use crate::update::{
    Adafactor, Adam, AdamW, AdamWith, GradientNorm, Method, Muon, OptimError, RateCurve, Sgd,
    StateFormat, clip_gradient_norm,
};
pub use ema::Ema;

use crate::Result;
use crate::pipeline::{Pipeline, Worker, clip_worker_gradients, made_optimizer, settled_optimizer};
use crate::update::{DEFAULT_GROUP, OptimizerPart, check_rate};
use parts::{Locked, Parts};

/// Group of the parameters that [`Optimizer::decay_only_matrices`] excludes from weight decay.
pub const NO_DECAY_GROUP: &str = "no-decay";

/// Updates parameters by their gradients.
#[derive(Debug)]
pub struct Optimizer {
    parts: Parts<OptimizerPart>,
    learning_rate: f64,
}

impl Pipeline {
    /// Makes an optimizer of all parameters. The optimizer skips parameters while they are frozen. The new
    /// optimizer replaces an earlier one.
    ///
    /// # Errors
    /// When an option is invalid, or a worker has ended.
    pub fn optimizer(&mut self, config: impl Into<Method>) -> Result<Optimizer> {
        let method = config.into();
        self.make_optimizers(method)?;
        Ok(Optimizer { parts: Parts::of_workers(self), learning_rate: method.learning_rate() })
    }
}

impl Optimizer {
    /// Creates an optimizer of the store's trainable variables. A step skips variables that are frozen by then.
    /// Variables that are created later are not included.
    ///
    /// # Errors
    /// When an option is invalid.
    pub fn new(vs: &nn::VarStore, config: impl Into<Method>) -> Result<Self> {
        Ok(Self::of(OptimizerPart::of_store(vs, config.into())?))
    }

    /// Creates an optimizer of these parameters.
    ///
    /// # Errors
    /// When an option is invalid, two parameters have the same name or are the same tensor, or a parameter is not
    /// a leaf or not a floating-point tensor.
    pub fn for_named(named: Vec<(String, Tensor)>, config: impl Into<Method>) -> Result<Self> {
        Ok(Self::of(OptimizerPart::of_named(named, config.into())?))
    }

    fn of(part: OptimizerPart) -> Self {
        let learning_rate = part.default_method().learning_rate();
        Self { parts: Parts::of_caller(part), learning_rate }
    }

    /// Creates a group of the parameters whose names satisfy `members`, with its own options and learning rate.
    ///
    /// # Errors
    /// When an option is invalid, the name is taken, no parameter satisfies `members`, a parameter of another
    /// group does, or a step was taken already. No group is created then.
    pub fn group(
        &mut self,
        name: &str,
        members: impl Fn(&str) -> bool,
        config: impl Into<Method>,
    ) -> Result<()> {
        let (group, method) = (name.to_owned(), config.into());
        let mut parts = self.parts.lock()?;
        let names = parts.names("group", settled_optimizer, OptimizerPart::names)?;
        let none = |parameters, first| {
            OptimError::EmptyGroup { group: name.to_owned(), parameters, first }.into()
        };
        let chosen = parts.chosen("group", &names, members, none)?;
        // All parts check the group before any part forms it. Otherwise, a refusal would leave the group half
        // made.
        parts.ranks.all_or_none("group", || {
            let group = group.clone();
            parts.each(chosen.clone(), settled_optimizer, move |part, members| {
                part.check_group(&group, &members, &method)
            })
        })?;
        let formed = parts.each(chosen, settled_optimizer, move |part, members| {
            part.form_group(&group, &members, method);
            Ok(())
        });
        formed.map(drop)
    }

    /// Excludes every parameter of fewer than two dimensions, that is biases and the weights of norms, from weight
    /// decay: these parameters become the group [`NO_DECAY_GROUP`]. Parameters of other groups keep their options.
    /// Does nothing if there are no such parameters.
    ///
    /// # Errors
    /// When a step was taken already, or the group exists. No group is created then.
    pub fn decay_only_matrices(&mut self) -> Result<()> {
        let mut parts = self.parts.lock()?;
        let read = parts.all(settled_optimizer, |part| {
            let method = part.default_method();
            part.check_group(NO_DECAY_GROUP, &[], &method)?;
            Ok((part.vectors(), method))
        });
        // The vote exchanges only names: whatever can fail has been read before it.
        let (vectors, method) = match read {
            Ok(read) => {
                let method = read[0].1;
                (Ok(read.into_iter().map(|(vectors, _)| vectors).collect()), Some(method))
            }
            Err(error) => (Err(error), None),
        };
        let vectors = parts.ranks.of_workers("weight decay", vectors)?;
        let vectors: HashSet<String> = vectors.into_iter().flatten().collect();
        let Some(method) = method.filter(|_| !vectors.is_empty()) else {
            return Ok(());
        };
        drop(parts);
        self.group(NO_DECAY_GROUP, |name| vectors.contains(name), method.without_decay())
    }

    /// Updates every parameter that has a gradient, on all devices or on none. Parameters without a gradient and
    /// frozen parameters stay unchanged, and so does their state. Does nothing if the parameters were updated [in
    /// the backward](crate::pipeline::Builder::update_in_backward).
    ///
    /// An offloaded stage of a pipeline is updated when its weights are fetched the next time. Reading, saving and
    /// evaluating finish the updates first, but a caller that keeps [`variables`](Pipeline::variables) or gradients
    /// must call [`wait`](Self::wait) before it reads or changes them.
    ///
    /// # Errors
    /// When memory runs out, or a gradient is sparse: parameters, state and step counters are unchanged
    /// then.
    pub fn step(&mut self) -> Result<()> {
        let mut parts = self.parts.lock()?;
        match &mut parts.holder {
            Locked::Caller(part) => part.step(),
            Locked::Workers(workers) => {
                let prepare = || workers.all(Worker::prepare_update);
                let plans = parts.ranks.all_or_none("optimizer step", prepare)?;
                // Copies of shared variables are updated before the next step, because nothing may fail after an
                // update.
                workers.each_or_error(plans, |worker, plan| worker.update(plan)).map(drop)
            }
        }
    }

    /// Finishes the updates of the last step. Without this call, an offloaded stage is updated when it is fetched
    /// the next time.
    ///
    /// # Errors
    /// Returns the error of a failed update.
    pub fn wait(&mut self) -> Result<()> {
        self.parts.lock()?.all(settled_optimizer, |_| Ok(())).map(drop)
    }

    /// Removes the gradients of all parameters, so that the next backward creates new ones.
    ///
    /// # Errors
    /// When libtorch refuses, or a worker has ended.
    pub fn zero_grad(&mut self) -> Result<()> {
        match &mut self.parts.lock()?.holder {
            Locked::Caller(part) => part.zero_grad(),
            Locked::Workers(workers) => {
                workers.all(|worker| worker.variables.zero_grad()).map(drop)
            }
        }
    }

    /// Scales the gradients down together if their 2-norm exceeds `max_norm`: see
    /// [`clip_gradient_norm`]. In a pipeline, the host waits for the norm.
    ///
    /// # Errors
    /// As for [`clip_gradient_norm`]; and with updates in the backward
    /// ([`update_in_backward`](crate::pipeline::Builder::update_in_backward)).
    pub fn clip_gradient_norm(&mut self, max_norm: f64) -> Result<GradientNorm> {
        let parts = self.parts.lock()?;
        match &parts.holder {
            Locked::Caller(part) => part.clip_gradient_norm(max_norm),
            Locked::Workers(workers) => clip_worker_gradients(workers, parts.ranks, max_norm),
        }
    }

    /// Returns the learning rate of the parameters that are in no group of their own.
    pub fn learning_rate(&self) -> f64 {
        self.learning_rate
    }

    /// Sets the learning rate of every group.
    ///
    /// # Errors
    /// When the rate is negative or not finite. The old learning rates stay then.
    pub fn set_learning_rate(&mut self, rate: f64) -> Result<()> {
        check_rate(rate)?;
        // Waiting updates keep the learning rate of their step.
        self.parts.lock()?.all(made_optimizer, move |part| {
            part.set_learning_rate(rate);
            Ok(())
        })?;
        self.learning_rate = rate;
        Ok(())
    }

    /// Returns the learning rate of one group.
    ///
    /// # Errors
    /// When there is no such group.
    pub fn group_learning_rate(&self, group: &str) -> Result<f64> {
        let group = group.to_owned();
        let read = move |part: &mut OptimizerPart| part.group_learning_rate(&group);
        Ok(self.parts.lock()?.all(made_optimizer, read)?[0])
    }

    /// Sets the learning rate of one group.
    ///
    /// # Errors
    /// When there is no such group, or the rate is negative or not finite.
    pub fn set_group_learning_rate(&mut self, group: &str, rate: f64) -> Result<()> {
        check_rate(rate)?;
        let name = group.to_owned();
        let set = move |part: &mut OptimizerPart| part.set_group_learning_rate(&name, rate);
        self.parts.lock()?.all(made_optimizer, set)?;
        if group == DEFAULT_GROUP {
            self.learning_rate = rate;
        }
        Ok(())
    }

    /// On CUDA, captures a step as a CUDA graph and replays it while parameters, gradients and state keep their
    /// addresses. A replay is one launch, without the host's work for each kernel. Has no effect on other devices
    /// or on a pipeline.
    ///
    /// The result differs by no more than the rounding of the learning rate to f32.
    #[must_use]
    pub fn cuda_graphs(mut self, wanted: bool) -> Self {
        if let Some(part) = self.parts.of_caller_mut() {
            part.set_cuda_graphs(wanted);
        }
        self
    }

    /// Returns the number of steps that were replayed.
    pub fn replayed(&self) -> usize {
        match self.parts.lock().map(|parts| parts.holder) {
            Ok(Locked::Caller(part)) => part.replayed(),
            _ => 0,
        }
    }
}
