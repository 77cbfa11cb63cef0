//! State of an optimizer as named tensors and texts, to be saved beside the model.
//!
//! | item | saved as |
//! | --- | --- |
//! | averages, buffers, step counts | tensors `PARAMETER.exp_avg`, `PARAMETER.step`, … |
//! | scales of 8-bit averages, one for 128 numbers in memory order | tensors `PARAMETER.exp_avg_scale`, … |
//! | remainder of a bf16 parameter: its f32 master's bits, less 2^16 times the parameter's | tensor `PARAMETER.remainder`; earlier versions saved the master |
//! | f32 master of an f16 parameter | tensor `PARAMETER.master` |
//! | a group's method, learning rate and options | text `group.GROUP`, as JSON |
//! | group of a parameter | text `parameter.PARAMETER` |

use std::collections::BTreeMap;

use tch::{Kind, Tensor};

use super::OptimError;
use super::state::{MASTER, ParameterState, REMAINDER, UNKNOWN_VERSION, remainder_of};
use super::{Method, OptimizerPart, Parameter, ParameterGroup};
use crate::save::Metadata;
use crate::{Error, Result};

const FORMAT: (&str, &str) = ("format", "brimful optimizer state 1");

/// Saved state that fits this optimizer, in memory of its own: states in the order of the parameters,
/// methods in the order of the groups.
#[derive(Debug)]
pub(crate) struct ReadState {
    states: Vec<Option<ParameterState>>,
    methods: Vec<Method>,
}

impl OptimizerPart {
    /// Returns the state: tensors by name, and texts for the rest.
    pub(crate) fn state(&self) -> (Vec<(String, Tensor)>, Metadata) {
        let mut tensors = Vec::new();
        let mut metadata = Metadata::from([(FORMAT.0.into(), FORMAT.1.into())]);
        for ParameterGroup { name, method } in &self.groups {
            metadata.insert(format!("group.{name}"), serde_json::json!(method).to_string());
        }
        for Parameter { name, group, state, tensor, .. } in &self.parameters {
            let ParameterGroup { name: group, method } = &self.groups[*group];
            let slots = method.moments(tensor.dim());
            metadata.insert(format!("parameter.{name}"), group.clone());
            let state = state.iter().filter(|state| !state.is_new);
            for (slot, tensor) in state.flat_map(|state| state.tensors(slots)) {
                tensors.push((format!("{name}.{slot}"), tensor.shallow_clone()));
            }
        }
        (tensors, metadata)
    }

    /// Reads a saved state into new memory. All of loading that can fail is here.
    pub(crate) fn read_state(
        &mut self,
        tensors: &[(String, Tensor)],
        metadata: &Metadata,
    ) -> Result<ReadState> {
        let _no_grad = tch::no_grad_guard();
        if metadata.get(FORMAT.0).map(String::as_str) != Some(FORMAT.1) {
            let saved = metadata.get(FORMAT.0).map_or("nothing", String::as_str);
            return Err(mismatch(FORMAT.0, format!("'{saved}'"), format!("'{}'", FORMAT.1)));
        }
        let methods = self.read_methods(metadata)?;
        self.check_names(metadata)?;
        let mut left: BTreeMap<&str, &Tensor> =
            tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        let mut states = Vec::new();
        for parameter in &self.parameters {
            states.push(read_state(parameter, &methods[parameter.group], &mut left)?);
        }
        match left.first_key_value() {
            Some((name, tensor)) => Err(mismatch(name, describe(tensor), "nothing".into())),
            None => Ok(ReadState { states, methods }),
        }
    }

    /// Replaces the optimizer's state with one that was read.
    pub(crate) fn take_state(&mut self, read: ReadState) {
        for (parameter, state) in self.parameters.iter_mut().zip(read.states) {
            parameter.state = state;
        }
        for (group, method) in self.groups.iter_mut().zip(read.methods) {
            group.method = method;
        }
        self.graphs.forget();
    }

    /// Returns the saved methods in the order of this optimizer's groups.
    fn read_methods(&self, metadata: &Metadata) -> Result<Vec<Method>> {
        let known = |name: &str| self.groups.iter().any(|group| group.name == name);
        let saved = metadata.keys().filter_map(|key| key.strip_prefix("group."));
        if let Some(name) = saved.into_iter().find(|name| !known(name)) {
            return Err(mismatch(name, "a group".into(), "none".into()));
        }
        self.groups.iter().map(|group| read_method(group, metadata)).collect()
    }

    /// Checks that the saved state has this optimizer's parameters and groups.
    fn check_names(&self, metadata: &Metadata) -> Result<()> {
        let saved = metadata.iter().filter_map(|(key, group)| {
            key.strip_prefix("parameter.").map(|name| (name, group.as_str()))
        });
        let saved: BTreeMap<_, _> = saved.collect();
        let here: BTreeMap<_, _> = (self.parameters.iter())
            .map(|parameter| (parameter.name.as_str(), self.groups[parameter.group].name.as_str()))
            .collect();
        let names = saved.keys().chain(here.keys());
        let differs = names.filter(|name| saved.get(*name) != here.get(*name)).min();
        let Some(name) = differs else { return Ok(()) };
        let describe = |group: Option<&&str>| {
            group.map_or("missing".to_owned(), |group| format!("in group '{group}'"))
        };
        Err(mismatch(name, describe(saved.get(name)), describe(here.get(name))))
    }
}

fn read_method(group: &ParameterGroup, metadata: &Metadata) -> Result<Method> {
    let ParameterGroup { name, method: here } = group;
    let Some(text) = metadata.get(&format!("group.{name}")) else {
        return Err(mismatch(name, "missing".into(), "a group".into()));
    };
    let saved: Method = serde_json::from_str(text).map_err(|error| {
        mismatch(name, format!("not a group's options ({error})"), here.name().into())
    })?;
    if saved.name() != here.name() {
        return Err(mismatch(name, saved.name().into(), here.name().into()));
    }
    saved.check()?;
    Ok(saved)
}

/// Removes this parameter's tensors from `left`, and returns copies of them as a state; `None` if there are none.
///
/// # Errors
/// When only some of the tensors are there, or a tensor has a different shape or dtype.
fn read_state(
    parameter: &Parameter,
    method: &Method,
    left: &mut BTreeMap<&str, &Tensor>,
) -> Result<Option<ParameterState>> {
    let Parameter { name, tensor, .. } = parameter;
    let _charged = parameter.enter_host_arena();
    let method = method.of(tensor.dim());
    let mut state = ParameterState::new(tensor, &method, None)?;
    let moments = method.moments(tensor.dim());
    let of = |slot: &str| format!("{name}.{slot}");
    let slots: Vec<_> = state.tensors(moments).map(|(slot, _)| slot).collect();
    let names = slots.iter().map(String::as_str).chain([MASTER]);
    if !names.map(of).any(|name| left.contains_key(name.as_str())) {
        return Ok(None);
    }
    for (slot, tensor) in state.tensors(moments) {
        let name = of(&slot);
        let mut saved = left.remove(name.as_str());
        // Earlier versions saved the master.
        let master = (slot == REMAINDER && saved.is_none()).then(|| left.remove(&*of(MASTER)));
        let remainder = master.flatten().filter(|master| master.kind() == Kind::Float);
        let remainder = remainder.map(remainder_of).transpose()?;
        saved = saved.or(remainder.as_ref());
        let saved = saved.ok_or_else(|| mismatch(&name, "missing".into(), describe(tensor)))?;
        if (saved.size(), saved.kind()) != (tensor.size(), tensor.kind()) {
            return Err(mismatch(&name, describe(saved), describe(tensor)));
        }
        tensor.shallow_clone().f_copy_(saved)?;
    }
    // The model's weights may be loaded before or after this state, and may differ from this master: the next step
    // compares the two.
    state.version = UNKNOWN_VERSION;
    state.is_new = false;
    Ok(Some(state))
}

fn describe(tensor: &Tensor) -> String {
    format!("{:?} of shape {:?}", tensor.kind(), tensor.size())
}

fn mismatch(name: &str, saved: String, here: String) -> Error {
    OptimError::StateMismatch { name: name.into(), saved, here }.into()
}
