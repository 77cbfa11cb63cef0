//! Updates of parameters: methods, the state of each parameter, fused steps, and averages.
//!
//! ```text
//!   OptimizerPart   parameters of one thread in groups ─ step.rs ▸ method.rs ▸ fused kernels of brimful-torch
//!   EmaPart         averages of one thread's variables
//! ```
//!
//! [`optim`](crate::optim) combines parts into an optimizer: one part for a store, or one part for each worker of
//! a pipeline.

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
pub(crate) use ema::{EmaPart, averages_mismatch, check_decay};
pub use error::OptimError;
pub use format::StateFormat;
pub use method::Method;
pub use muon::Muon;
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

/// Number of dimensions from which a parameter is a matrix.
const MATRIX_DIMENSIONS: usize = 2;

/// Parameters of one thread, with the state of their updates.
#[derive(Debug)]
pub(crate) struct OptimizerPart {
    parameters: Vec<Parameter>,
    groups: Vec<ParameterGroup>,
    graphs: OptimizerGraphs,
}

#[derive(Debug)]
struct Parameter {
    name: String,
    tensor: Tensor,
    group: usize,
    /// Offloading of the parameter; `None` if the parameter stays on its device.
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

impl OptimizerPart {
    /// Creates a part of the store's trainable variables.
    pub(crate) fn of_store(vs: &nn::VarStore, method: Method) -> Result<Self> {
        // The store names all variables, but lists the trainable ones without their names.
        let trainable: HashSet<_> = vs.trainable_variables().iter().map(place).collect();
        let named = vs.variables().into_iter().filter(|(_, t)| trainable.contains(&place(t)));
        let mut named: Vec<_> = named.collect();
        named.sort_by(|(a, _), (b, _)| a.cmp(b));
        Self::of_named(named, method)
    }

    /// Creates a part of these parameters.
    pub(crate) fn of_named(named: Vec<(String, Tensor)>, method: Method) -> Result<Self> {
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

    /// Checks that a group of these parameters can be created.
    pub(crate) fn check_group(
        &self,
        name: &str,
        members: &[String],
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
        let members: HashSet<&String> = members.iter().collect();
        let taken = self.parameters.iter().find(|p| p.group != 0 && members.contains(&p.name));
        if let Some(Parameter { name: parameter, group, .. }) = taken {
            let other = &self.groups[*group].name;
            return bad(format!(
                "'{parameter}' is in group '{other}'; let one of them leave it out"
            ));
        }
        Ok(())
    }

    /// Moves these parameters to a new group. Every part has every group, with or without parameters.
    pub(crate) fn form_group(&mut self, name: &str, members: &[String], method: Method) {
        let index = self.groups.len();
        let members: HashSet<&String> = members.iter().collect();
        for parameter in self.parameters.iter_mut().filter(|p| members.contains(&p.name)) {
            parameter.group = index;
            // The state was made for the old options, and no step has used it.
            parameter.state = None;
        }
        self.groups.push(ParameterGroup { name: name.into(), method });
    }

    /// Returns the method of parameters without a group of their own.
    pub(crate) fn default_method(&self) -> Method {
        self.groups[0].method
    }

    /// Returns the parameters of the default group that have fewer than two dimensions.
    pub(crate) fn vectors(&self) -> Vec<String> {
        let all = self.parameters.iter();
        let vectors = all.filter(|p| p.group == 0 && p.tensor.dim() < MATRIX_DIMENSIONS);
        vectors.map(|parameter| parameter.name.clone()).collect()
    }

    pub(crate) fn zero_grad(&mut self) -> Result<()> {
        for parameter in &mut self.parameters {
            autograd::set_gradient(&mut parameter.tensor, None)?;
        }
        Ok(())
    }

    pub(crate) fn clip_gradient_norm(&self, max_norm: f64) -> Result<GradientNorm> {
        clip_gradient_norm(self.parameters.iter().map(|parameter| &parameter.tensor), max_norm)
    }

    /// Sets the learning rate of every group.
    pub(crate) fn set_learning_rate(&mut self, rate: f64) {
        self.groups.iter_mut().for_each(|group| group.method.set_learning_rate(rate));
    }

    /// Returns the learning rate of one group.
    pub(crate) fn group_learning_rate(&self, group: &str) -> Result<f64> {
        let found = self.groups.iter().find(|known| known.name == group);
        found.map(|group| group.method.learning_rate()).ok_or_else(|| self.no_group(group))
    }

    /// Sets the learning rate of one group.
    pub(crate) fn set_group_learning_rate(&mut self, group: &str, rate: f64) -> Result<()> {
        match self.groups.iter_mut().find(|known| known.name == group) {
            Some(found) => found.method.set_learning_rate(rate),
            None => return Err(self.no_group(group)),
        }
        Ok(())
    }

    /// Returns the parameters with their names.
    pub(crate) fn parameters(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.parameters.iter().map(|parameter| (parameter.name.as_str(), &parameter.tensor))
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.parameters.iter().map(|parameter| parameter.name.clone()).collect()
    }

    /// Returns the method of the parameter's group, resolved for the parameter's number of dimensions.
    fn method_of(&self, parameter: &Parameter) -> Method {
        self.groups[parameter.group].method.of(parameter.tensor.dim())
    }

    fn no_group(&self, group: &str) -> Error {
        let known: Vec<_> = self.groups.iter().map(|group| group.name.as_str()).collect();
        OptimError::NoGroup { group: group.into(), known: known.join(", ") }.into()
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

/// Checks that each tensor is defined and has a unique name.
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
