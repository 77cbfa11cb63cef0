//! State of offloaded parameters, which is made before their first update, in memory that their stage chooses.

use tch::{Device, Tensor};

use super::state::ParameterState;
use super::{OptimizerPart, Parameter};
use crate::Result;
use crate::memory::Arena;

/// Offloading of a parameter.
#[derive(Debug, Clone)]
pub(crate) struct OffloadedParameter {
    /// Part of the step that updates the parameter: the index of its stage.
    pub(crate) part: usize,
    /// Device that updates the parameter.
    pub(crate) device: Device,
    /// Arena to which the parameter's state is charged.
    pub(crate) arena: Option<Arena>,
}

impl Parameter {
    /// Returns whether the parameter is in this part, and has a state or is trainable. `None` is the part of all
    /// parameters that are not offloaded.
    fn is_of(&self, part: Option<usize>) -> bool {
        let is_here = self.offload.as_ref().map(|offload| offload.part) == part;
        is_here && (self.state.is_some() || self.tensor.requires_grad())
    }
}

impl OptimizerPart {
    /// Returns whether every parameter of this part has a state that fits the parameter, and `held` is true of all
    /// tensors of the state.
    pub(crate) fn has_states(&self, part: usize, held: impl Fn(&Tensor) -> bool) -> bool {
        let mut parameters = self.parameters.iter().filter(|parameter| parameter.is_of(Some(part)));
        parameters.all(|parameter| {
            let method = self.method_of(parameter);
            let state = parameter.state.as_ref();
            let state = state.filter(|state| state.suits(&parameter.tensor, &method));
            state.is_some_and(|state| state.all_tensors().all(&held))
        })
    }

    /// Returns an upper bound of the bytes of this part's state, with this alignment of each tensor.
    pub(crate) fn state_bytes(&self, part: usize, alignment: usize) -> u64 {
        let parameters = self.parameters.iter().filter(|parameter| parameter.is_of(Some(part)));
        let bytes = parameters.map(|parameter| {
            let method = self.method_of(parameter);
            // Step counter, master, and moments with their scales.
            let tensors = 2 + 2 * method.moments(parameter.tensor.dim()).len();
            method.state_bytes([&parameter.tensor]) + (tensors * alignment) as u64
        });
        bytes.sum()
    }

    /// Makes the states that this part lacks, and passes each tensor of all its states to `place`, which may move it.
    /// A step that was prepared before keeps the states that it made itself.
    pub(crate) fn make_states(
        &mut self,
        part: Option<usize>,
        mut place: impl FnMut(&Tensor) -> Result<()>,
    ) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        for index in 0..self.parameters.len() {
            let parameter = &self.parameters[index];
            if !parameter.is_of(part) {
                continue;
            }
            let (tensor, method) = (&parameter.tensor, self.method_of(parameter));
            let old = parameter.state.as_ref();
            if !old.is_some_and(|old| old.suits(tensor, &method)) {
                let _charged = parameter.enter_host_arena();
                let state = ParameterState::new(tensor, &method, old)?;
                self.parameters[index].state = Some(state);
            }
            let state = self.parameters[index].state.as_ref();
            state.iter().flat_map(|state| state.all_tensors()).try_for_each(&mut place)?;
        }
        Ok(())
    }
}
