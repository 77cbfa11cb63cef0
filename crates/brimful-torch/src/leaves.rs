//! Known leaves, which a backward may add to, and a search for other leaves that a backward would reach.

use tch::Tensor;

use crate::error::TorchError;
use crate::ffi::{self, RawKnownLeaves};
use crate::{owned_or_none, raw_list};

/// Leaves that backwards may add to, listed once for all backwards.
#[derive(Debug)]
pub struct KnownLeaves(*mut RawKnownLeaves);

// SAFETY: the list holds tensors, which are `Send`, and has one owner.
unsafe impl Send for KnownLeaves {}

/// Result of a backward that may reach only known leaves.
#[derive(Debug)]
pub enum Reach<T> {
    /// The backward reached only known leaves, and returned this value.
    Known(T),
    /// The backward would also reach this leaf, so nothing was run.
    Other(Tensor),
}

impl KnownLeaves {
    /// Lists these leaves.
    ///
    /// # Errors
    /// When memory for the list runs out.
    pub fn new<'a>(leaves: impl IntoIterator<Item = &'a Tensor>) -> Result<Self, TorchError> {
        // SAFETY: takes nothing; the caller owns the new list.
        let mut known = Self(unsafe { ffi::brimful_known_leaves() }?);
        known.add(leaves)?;
        Ok(known)
    }

    /// Adds leaves to the list.
    ///
    /// # Errors
    /// When memory for the list runs out.
    pub fn add<'a>(
        &mut self,
        leaves: impl IntoIterator<Item = &'a Tensor>,
    ) -> Result<(), TorchError> {
        let leaves = raw_list(leaves);
        // SAFETY: the array has `leaves.len()` valid tensors; the list lives as long as `self`.
        unsafe { ffi::brimful_know_leaves(self.0, leaves.as_ptr(), leaves.len()) }
    }

    pub(crate) fn raw(&self) -> *const RawKnownLeaves {
        self.0
    }
}

impl Drop for KnownLeaves {
    fn drop(&mut self) {
        // SAFETY: the list was made by `brimful_known_leaves`, and is released only here.
        unsafe { ffi::brimful_forget_leaves(self.0) }
    }
}

/// Returns a leaf, if any, that a backward from these roots would reach and that is not known.
///
/// # Errors
/// When memory to walk the graph runs out.
pub fn other_leaf<'a>(
    roots: impl IntoIterator<Item = &'a Tensor>,
    known: &KnownLeaves,
) -> Result<Option<Tensor>, TorchError> {
    let roots = raw_list(roots);
    // SAFETY: the array has `roots.len()` valid tensors, and `known` outlives the call.
    unsafe { ffi::brimful_other_leaf(roots.as_ptr(), roots.len(), known.raw()) }.map(owned_or_none)
}
