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
//! *Atomic.* A step allocates all that it needs before it changes anything, and nothing afterwards. A step
//! that runs out of memory leaves parameters, state and step counters unchanged.
//!
//! *Half precision.* Updates go to f32 masters: bf16 has 8 significant bits, and most of a small update would be
//! rounded away. A bf16 parameter is the upper half of its master, so its state has the lower 16 bits alone; an f16
//! parameter's has the whole master. Averages are in f32 unless a [`StateFormat`] says otherwise.
//!
//! *tch's optimizers* can be used instead wherever the caller steps: both read the gradients from the
//! parameters.

mod adafactor;
mod adam;
mod captured_step;
mod clip;
mod ema;
mod error;
mod format;
mod graphs;
mod method;
mod muon;
mod no_decay;
mod number_options;
mod offloaded;
mod rate_curve;
mod saved;
mod scratch;
mod sgd;
mod state;
mod step;

pub use adafactor::Adafactor;
pub use adam::{Adam, AdamW, AdamWith};
pub use clip::{GradientNorm, clip_gradient_norm};
pub(crate) use clip::{check_max_norm, clip_factor};
pub use ema::Ema;
pub use error::OptimError;
pub use format::StateFormat;
pub use method::Method;
pub use muon::Muon;
pub use no_decay::NO_DECAY_GROUP;
pub(crate) use number_options::check_rate;
pub(crate) use offloaded::OffloadedParameter;
pub use rate_curve::RateCurve;
pub use sgd::Sgd;
pub(crate) use step::OptimizerPlan;

use std::collections::{HashMap, HashSet};
use std::ffi::c_void;

use brimful_torch::arena::ArenaGuard;
use brimful_torch::autograd;
use tch::{Kind, Tensor, nn};

use crate::memory::Arena;
use crate::{Error, Result};
use captured_step::OptimizerGraphs;
use state::ParameterState;

/// Group of the parameters that are in no other group.
pub(crate) const DEFAULT_GROUP: &str = "default";

/// Updates parameters by their gradients.
#[derive(Debug)]
pub struct Optimizer {
    parameters: Vec<Parameter>,
    groups: Vec<ParameterGroup>,
    graphs: OptimizerGraphs,
}

#[derive(Debug)]
struct Parameter {
    name: String,
    tensor: Tensor,
    group: usize,
    /// Its offloading; `None` if it stays on its device.
    offload: Option<OffloadedParameter>,
    /// `None` until the first step, or until `make_states`.
    state: Option<ParameterState>,
}

impl Parameter {
    fn new(name: String, tensor: Tensor) -> Self {
        Self { name, tensor, group: 0, offload: None, state: None }
    }

    /// Charges allocations to the host's arena while the guard lives, if the parameter is offloaded.
    fn enter_host_arena(&self) -> Option<ArenaGuard> {
        self.offload.as_ref().and_then(|offload| offload.arena.as_ref()).map(Arena::enter)
    }
}

#[derive(Debug)]
struct ParameterGroup {
    name: String,
    method: Method,
}

impl Optimizer {
    /// Creates an optimizer of the store's trainable variables. A step skips variables that are frozen by then.
    /// Variables that are created later are not included.
    ///
    /// # Errors
    /// When an option is invalid.
    pub fn new(vs: &nn::VarStore, config: impl Into<Method>) -> Result<Self> {
        // The store names all variables, but lists the trainable ones without their names.
        let trainable: HashSet<_> = vs.trainable_variables().iter().map(place).collect();
        let named = vs.variables().into_iter().filter(|(_, t)| trainable.contains(&place(t)));
        let mut named: Vec<_> = named.collect();
        named.sort_by(|(a, _), (b, _)| a.cmp(b));
        Self::for_named(named, config)
    }

    /// Creates an optimizer of these parameters.
    ///
    /// # Errors
    /// When an option is invalid, two parameters have the same name or are the same tensor, or one is not a
    /// leaf or not a floating-point tensor.
    pub fn for_named(named: Vec<(String, Tensor)>, config: impl Into<Method>) -> Result<Self> {
        let method = config.into();
        method.check()?;
        check_parameters(&named)?;
        let parameters =
            named.into_iter().map(|(name, tensor)| Parameter::new(name, tensor)).collect();
        let groups = vec![ParameterGroup { name: DEFAULT_GROUP.into(), method }];
        Ok(Self { parameters, groups, graphs: OptimizerGraphs::default() })
    }

    /// Sets which parameters are offloaded, by their names.
    pub(crate) fn set_offloaded(&mut self, offload: impl Fn(&str) -> Option<OffloadedParameter>) {
        self.parameters
            .iter_mut()
            .for_each(|parameter| parameter.offload = offload(&parameter.name));
    }

    /// Creates a group of the parameters whose names satisfy `members`, with its own options and learning rate.
    ///
    /// # Errors
    /// When an option is invalid, the name is taken, no parameter or one of another group satisfies
    /// `members`, or a step was taken already. No group is created then.
    pub fn group(
        &mut self,
        name: &str,
        members: impl Fn(&str) -> bool,
        config: impl Into<Method>,
    ) -> Result<()> {
        let method = config.into();
        self.check_group(name, &members, &method)?;
        match self.form_group(name, |parameter| members(&parameter.name), method) {
            true => Ok(()),
            false => Err(self.no_member(name)),
        }
    }

    /// Moves these parameters to a new group; returns false if there are none.
    fn form_group(
        &mut self,
        name: &str,
        is_member: impl Fn(&Parameter) -> bool,
        method: Method,
    ) -> bool {
        let index = self.groups.len();
        let mut any = false;
        for parameter in self.parameters.iter_mut().filter(|parameter| is_member(parameter)) {
            parameter.group = index;
            // It was made for the old options, and no step was taken with it.
            parameter.state = None;
            any = true;
        }
        if any {
            self.groups.push(ParameterGroup { name: name.into(), method });
        }
        any
    }

    /// Checks that a group of these parameters can be created.
    pub(crate) fn check_group(
        &self,
        name: &str,
        members: impl Fn(&str) -> bool,
        method: &Method,
    ) -> Result<()> {
        method.check()?;
        let bad = |reason: String| Err(OptimError::BadGroup { group: name.into(), reason }.into());
        if self.groups.iter().any(|group| group.name == name) {
            return bad("there is one of that name; choose another".into());
        }
        let has_stepped =
            |parameter: &Parameter| parameter.state.as_ref().is_some_and(|state| !state.is_new);
        if self.parameters.iter().any(has_stepped) {
            return bad("a step was taken already; make all groups before the first".into());
        }
        let taken = self.parameters.iter().find(|p| members(&p.name) && p.group != 0);
        if let Some(Parameter { name: parameter, group, .. }) = taken {
            let other = &self.groups[*group].name;
            return bad(format!(
                "'{parameter}' is in group '{other}'; let one of them leave it out"
            ));
        }
        Ok(())
    }

    /// Removes the gradients of all parameters, so that the next backward creates new ones.
    ///
    /// # Errors
    /// When libtorch refuses.
    pub fn zero_grad(&mut self) -> Result<()> {
        for parameter in &mut self.parameters {
            autograd::set_gradient(&mut parameter.tensor, None)?;
        }
        Ok(())
    }

    /// Scales the gradients down together if their 2-norm exceeds `max_norm`: see
    /// [`clip_gradient_norm`].
    ///
    /// # Errors
    /// As for [`clip_gradient_norm`].
    pub fn clip_gradient_norm(&self, max_norm: f64) -> Result<GradientNorm> {
        clip_gradient_norm(self.parameters.iter().map(|parameter| &parameter.tensor), max_norm)
    }

    /// Returns the learning rate of the parameters that are in no group of their own.
    pub fn learning_rate(&self) -> f64 {
        self.groups[0].method.learning_rate()
    }

    /// Sets the learning rate of every group.
    ///
    /// # Errors
    /// When it is negative or not finite; the old ones stay then.
    pub fn set_learning_rate(&mut self, rate: f64) -> Result<()> {
        check_rate(rate)?;
        for group in &mut self.groups {
            group.method.set_learning_rate(rate);
        }
        Ok(())
    }

    /// Returns the learning rate of one group.
    ///
    /// # Errors
    /// When there is no such group.
    pub fn group_learning_rate(&self, group: &str) -> Result<f64> {
        let found = self.groups.iter().find(|known| known.name == group);
        found.map(|group| group.method.learning_rate()).ok_or_else(|| self.no_group(group))
    }

    /// Sets the learning rate of one group.
    ///
    /// # Errors
    /// When there is no such group, or the rate is negative or not finite.
    pub fn set_group_learning_rate(&mut self, group: &str, rate: f64) -> Result<()> {
        check_rate(rate)?;
        match self.groups.iter_mut().find(|known| known.name == group) {
            Some(found) => found.method.set_learning_rate(rate),
            None => return Err(self.no_group(group)),
        }
        Ok(())
    }

    /// Returns the parameters with their names.
    pub fn parameters(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.parameters.iter().map(|parameter| (parameter.name.as_str(), &parameter.tensor))
    }

    /// Returns the groups' names.
    pub(crate) fn groups(&self) -> impl Iterator<Item = &str> {
        self.groups.iter().map(|group| group.name.as_str())
    }

    /// Returns the method of the parameter's group, resolved for the parameter's number of dimensions.
    fn method_of(&self, parameter: &Parameter) -> Method {
        self.groups[parameter.group].method.of(parameter.tensor.dim())
    }

    fn no_group(&self, group: &str) -> Error {
        let known: Vec<_> = self.groups().collect();
        OptimError::NoGroup { group: group.into(), known: known.join(", ") }.into()
    }

    fn no_member(&self, group: &str) -> Error {
        let first = self.parameters.first().map(|first| first.name.clone()).unwrap_or_default();
        OptimError::EmptyGroup { group: group.into(), parameters: self.parameters.len(), first }
            .into()
    }
}

/// Returns the address, size and strides of a tensor, which are the same for its shallow clones.
fn place(tensor: &Tensor) -> (*mut c_void, Vec<i64>, Vec<i64>) {
    (tensor.data_ptr(), tensor.size(), tensor.stride())
}

fn check_parameters(named: &[(String, Tensor)]) -> Result<()> {
    check_named(named)?;
    let mut places = HashMap::new();
    for (name, tensor) in named {
        let bad = |reason: String| {
            Err(OptimError::BadParameter { parameter: name.clone(), reason }.into())
        };
        if !matches!(tensor.kind(), Kind::Double | Kind::Float | Kind::Half | Kind::BFloat16) {
            return bad(format!("it is of kind {:?}; make it floating-point", tensor.kind()));
        }
        if !tensor.is_leaf() {
            return bad("it was computed from others; give those instead".into());
        }
        if overlaps(tensor) {
            return bad("its elements share memory; give it memory of its own".into());
        }
        if tensor.numel() > 0
            && let Some(other) = places.insert(place(tensor), name)
        {
            return bad(format!("it is the same tensor as '{other}'; give it once"));
        }
    }
    Ok(())
}

/// Checks that each is defined and has a name of its own.
fn check_named(named: &[(String, Tensor)]) -> Result<()> {
    let mut names = HashSet::new();
    for (name, tensor) in named {
        let reason = match (tensor.defined(), names.insert(name)) {
            (true, true) => continue,
            (false, _) => "it is an undefined tensor; leave it out",
            (true, false) => "two have that name; give each its own",
        };
        let bad = OptimError::BadParameter { parameter: name.clone(), reason: reason.into() };
        return Err(bad.into());
    }
    Ok(())
}

/// Returns whether elements share memory, as in an expanded tensor.
fn overlaps(tensor: &Tensor) -> bool {
    tensor.size().iter().zip(tensor.stride()).any(|(&size, stride)| size > 1 && stride == 0)
}
