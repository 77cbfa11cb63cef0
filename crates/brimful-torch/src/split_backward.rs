//! Split backward: the input gradients (dX) first, the weight gradients (dW) later.

use std::ptr;

use tch::Tensor;

use crate::error::{TorchError, take_string};
use crate::ffi::{self, RawSplit};
use crate::leaves::{KnownLeaves, Reach};
use crate::{owned_or_none, raw, raw_list};

/// Weight part (dW) of a backward whose input part (dX) has run. Until the weight part runs, it keeps the tensors
/// that the weight gradients are computed from, and nothing else of the graph.
///
/// Hooks of tensors that feed a weight's node run in both parts. Norms, recurrent layers and custom functions run
/// whole in the input part; their weight gradients are kept here.
#[derive(Debug)]
pub struct SplitBackward {
    split: *mut RawSplit,
    groups: usize,
}

/// Gradient of each input, or `None` if no gradient reached it.
pub type InputGradients = Vec<Option<Tensor>>;

/// Input gradients of each group, and the pending weight part.
pub type Begun = (Vec<InputGradients>, SplitBackward);

// SAFETY: the C++ object holds tensors and graph nodes, which may be sent between threads, and has one owner.
unsafe impl Send for SplitBackward {}

impl SplitBackward {
    /// Computes the input gradients of each group of roots; every root comes with its gradient.
    ///
    /// No leaf's gradient changes, except by layers that run another backward inside their own. The graph cannot be
    /// used a second time, and the saved tensors must not change until the weight part is done.
    ///
    /// # Errors
    /// When libtorch refuses: a shape does not match, or memory runs out.
    pub fn input_gradients(
        groups: &[Vec<(Tensor, Tensor)>],
        inputs: &[Tensor],
    ) -> Result<Begun, TorchError> {
        match Self::begin(None, groups, inputs)? {
            Reach::Known(begun) => Ok(begun),
            Reach::Other(_) => unreachable!("without known leaves there are no others"),
        }
    }

    /// Runs [`input_gradients`](Self::input_gradients) if the roots lead only to known leaves and to the inputs.
    /// Otherwise returns one of the other leaves and runs nothing.
    ///
    /// # Errors
    /// As [`input_gradients`](Self::input_gradients).
    pub fn input_gradients_to(
        known: &KnownLeaves,
        groups: &[Vec<(Tensor, Tensor)>],
        inputs: &[Tensor],
    ) -> Result<Reach<Begun>, TorchError> {
        Self::begin(Some(known), groups, inputs)
    }

    fn begin(
        known: Option<&KnownLeaves>,
        groups: &[Vec<(Tensor, Tensor)>],
        inputs: &[Tensor],
    ) -> Result<Reach<Begun>, TorchError> {
        let roots = raw_list(groups.iter().flatten().map(|(root, _)| root));
        let leaves = raw_list(inputs);
        let known = known.map_or(ptr::null(), KnownLeaves::raw);
        let mut made = ptr::null_mut();
        // SAFETY: each array has as many valid tensors as the length passed with it says. `known` is null or
        // outlives the call.
        let other = unsafe {
            let (roots, count) = (roots.as_ptr(), roots.len());
            let (leaves, length) = (leaves.as_ptr(), leaves.len());
            ffi::brimful_split_backward(roots, count, leaves, length, known, &mut made)
        }?;
        if let Some(other) = owned_or_none(other) {
            return Ok(Reach::Other(other));
        }
        let split = Self { split: made, groups: groups.len() };
        let mut gradients = Vec::with_capacity(groups.len());
        for (group, roots) in groups.iter().enumerate() {
            gradients.push(split.inward(roots, inputs.len(), group + 1 == groups.len())?);
        }
        Ok(Reach::Known((gradients, split)))
    }

    fn inward(
        &self,
        roots: &[(Tensor, Tensor)],
        inputs: usize,
        last: bool,
    ) -> Result<InputGradients, TorchError> {
        let (roots, gradients): (Vec<_>, Vec<_>) =
            roots.iter().map(|(root, gradient)| (raw(root), raw(gradient))).unzip();
        let mut out = vec![ptr::null_mut(); inputs];
        // SAFETY: `roots` and `gradients` have `count` valid tensors each; `out` has a place for each input.
        unsafe {
            let (roots, gradients, count) = (roots.as_ptr(), gradients.as_ptr(), roots.len());
            let out = out.as_mut_ptr();
            ffi::brimful_split_input_gradients(self.split, roots, gradients, count, last, out)
        }?;
        Ok(out.into_iter().map(owned_or_none).collect())
    }

    /// Returns the number of groups of roots.
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// Computes a group's weight gradients and adds them to the leaves that are not inputs. Call it once for each
    /// group, in order.
    ///
    /// # Errors
    /// When there is no such group, or libtorch refuses: memory runs out, or a weight was changed meanwhile.
    pub fn add_weight_gradients(&mut self, group: usize) -> Result<(), TorchError> {
        // SAFETY: the C++ object lives as long as `self`, and checks the group.
        unsafe { ffi::brimful_split_add_weight_gradients(self.split, group) }
    }

    /// Computes a group's gradients of these leaves only and returns them, without adding them anywhere.
    ///
    /// # Errors
    /// As [`add_weight_gradients`](Self::add_weight_gradients).
    pub fn weight_gradients(
        &mut self,
        group: usize,
        leaves: &[Tensor],
    ) -> Result<Vec<Option<Tensor>>, TorchError> {
        let mut out = vec![ptr::null_mut(); leaves.len()];
        let leaves = raw_list(leaves);
        // SAFETY: `leaves` has `count` valid tensors, and `out` a place for each of them.
        unsafe {
            let (leaves, count, out) = (leaves.as_ptr(), leaves.len(), out.as_mut_ptr());
            ffi::brimful_split_weight_gradients(self.split, group, leaves, count, out)
        }?;
        Ok(out.into_iter().map(owned_or_none).collect())
    }

    /// Returns the names of the nodes, if any, that ran whole because they are not libtorch's own.
    pub fn run_whole(&self) -> Option<String> {
        // SAFETY: the C++ object lives as long as `self`; the caller owns the text.
        take_string(unsafe { ffi::brimful_split_unknown(self.split) })
    }
}

impl Drop for SplitBackward {
    fn drop(&mut self) {
        // SAFETY: the C++ object was made by `brimful_split_backward`, and is released only here.
        unsafe { ffi::brimful_split_free(self.split) }
    }
}
