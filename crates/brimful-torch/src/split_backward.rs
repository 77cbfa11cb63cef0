//! A backward in two halves: the gradients of the inputs, and later those of the weights.

use std::ptr;

use tch::Tensor;

use crate::error::{TorchError, take_string};
use crate::ffi::{self, RawSplit};
use crate::leaves::{KnownLeaves, Reach};
use crate::{owned_or_none, raw, raw_list};

/// The weight half of a backward whose input half has run. Until then it keeps what the weights'
/// gradients are computed from, and nothing else of the graph.
///
/// Hooks of tensors that feed a weight's node run in both halves. Norms, recurrent layers and functions
/// of one's own run whole in the input half, and their weights' gradients wait here.
#[derive(Debug)]
pub struct SplitBackward {
    split: *mut RawSplit,
    groups: usize,
}

/// One gradient an input, or none where nothing has reached it.
pub type InputGradients = Vec<Option<Tensor>>;

/// Each group's gradients of the inputs, and the weight half.
pub type Begun = (Vec<InputGradients>, SplitBackward);

// SAFETY: it is tensors and nodes of a graph, which may be sent as tensors may, and it is used through
// one owner.
unsafe impl Send for SplitBackward {}

impl SplitBackward {
    /// Runs the input half of a backward from several groups of roots, each root with its gradient, and
    /// gives the inputs' gradients of each group.
    ///
    /// No gradient of a leaf is touched, save by layers that run a backward inside theirs. The graph
    /// cannot be run again, and what the gradients were computed from must stay as it is until the weight
    /// half is done.
    ///
    /// # Errors
    /// When libtorch refuses: a shape that does not match, memory that runs out.
    pub fn input_half(
        groups: &[Vec<(Tensor, Tensor)>],
        inputs: &[Tensor],
    ) -> Result<Begun, TorchError> {
        match Self::begin(None, groups, inputs)? {
            Reach::Known(begun) => Ok(begun),
            Reach::Other(_) => unreachable!("without known leaves there are no others"),
        }
    }

    /// The same where the roots lead to known leaves and to the inputs alone. Otherwise one of the others is
    /// given, and nothing is run.
    ///
    /// # Errors
    /// As [`input_half`](Self::input_half).
    pub fn input_half_to(
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
        // SAFETY: the arrays have that many valid tensors.
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
        // SAFETY: the arrays have that many valid tensors; `out` has a place for each input.
        unsafe {
            let (roots, gradients, count) = (roots.as_ptr(), gradients.as_ptr(), roots.len());
            let out = out.as_mut_ptr();
            ffi::brimful_split_input_half(self.split, roots, gradients, count, last, out)
        }?;
        Ok(out.into_iter().map(owned_or_none).collect())
    }

    /// How many groups of roots there were.
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// Adds a group's gradients to those of the leaves that are no inputs; each group once, in their
    /// order.
    ///
    /// # Errors
    /// When there is no such group, or libtorch refuses: memory that runs out, or a weight that was
    /// changed meanwhile.
    pub fn weight_half(&mut self, group: usize) -> Result<(), TorchError> {
        // SAFETY: it lives as long as `self`, and checks the group.
        unsafe { ffi::brimful_split_weight_half(self.split, group) }
    }

    /// A group's gradients of these leaves alone, in place of adding them to anyone's.
    ///
    /// # Errors
    /// As [`weight_half`](Self::weight_half).
    pub fn weight_gradients(
        &mut self,
        group: usize,
        leaves: &[Tensor],
    ) -> Result<Vec<Option<Tensor>>, TorchError> {
        let mut out = vec![ptr::null_mut(); leaves.len()];
        let leaves = raw_list(leaves);
        // SAFETY: the array has that many valid tensors; `out` has a place for each.
        unsafe {
            let (leaves, count, out) = (leaves.as_ptr(), leaves.len(), out.as_mut_ptr());
            ffi::brimful_split_weight_gradients(self.split, group, leaves, count, out)
        }?;
        Ok(out.into_iter().map(owned_or_none).collect())
    }

    /// The nodes that have run whole because they are not libtorch's own, by name.
    pub fn run_whole(&self) -> Option<String> {
        // SAFETY: it lives as long as `self`; the text is ours.
        take_string(unsafe { ffi::brimful_split_unknown(self.split) })
    }
}

impl Drop for SplitBackward {
    fn drop(&mut self) {
        // SAFETY: made by `brimful_split_backward`, and given back once.
        unsafe { ffi::brimful_split_free(self.split) }
    }
}
