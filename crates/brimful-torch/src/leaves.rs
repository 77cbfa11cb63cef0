//! Leaves that a backward may add to, and others that it would come to.

use tch::Tensor;

use crate::error::TorchError;
use crate::ffi::{self, RawKnownLeaves};
use crate::{owned_or_none, raw_list};

/// The leaves that backwards may add to, listed once for all of them.
#[derive(Debug)]
pub struct KnownLeaves(*mut RawKnownLeaves);

// SAFETY: it is tensors, which may be sent, and it is used through one owner.
unsafe impl Send for KnownLeaves {}

/// What becomes of a backward that may come to known leaves alone.
#[derive(Debug)]
pub enum Reach<T> {
    /// It came to them alone, and has given this.
    Known(T),
    /// It would add to this leaf too. Nothing was run.
    Other(Tensor),
}

impl KnownLeaves {
    /// # Errors
    /// When there is no memory for the list.
    pub fn new<'a>(leaves: impl IntoIterator<Item = &'a Tensor>) -> Result<Self, TorchError> {
        // SAFETY: what is made is ours.
        let mut known = Self(unsafe { ffi::brimful_known_leaves() }?);
        known.add(leaves)?;
        Ok(known)
    }

    /// Adds to the list.
    ///
    /// # Errors
    /// When there is no memory for it.
    pub fn add<'a>(
        &mut self,
        leaves: impl IntoIterator<Item = &'a Tensor>,
    ) -> Result<(), TorchError> {
        let leaves = raw_list(leaves);
        // SAFETY: the array has that many valid tensors; the list lives as long as `self`.
        unsafe { ffi::brimful_know_leaves(self.0, leaves.as_ptr(), leaves.len()) }
    }

    pub(crate) fn raw(&self) -> *const RawKnownLeaves {
        self.0
    }
}

impl Drop for KnownLeaves {
    fn drop(&mut self) {
        // SAFETY: made by `brimful_known_leaves`, and given back once.
        unsafe { ffi::brimful_forget_leaves(self.0) }
    }
}

/// A leaf, if there is one, that backward from these roots would add to and that is none of those that
/// are known.
///
/// # Errors
/// When there is no memory to walk through the graph.
pub fn other_leaf<'a>(
    roots: impl IntoIterator<Item = &'a Tensor>,
    known: &KnownLeaves,
) -> Result<Option<Tensor>, TorchError> {
    let roots = raw_list(roots);
    // SAFETY: the array has that many valid tensors.
    unsafe { ffi::brimful_other_leaf(roots.as_ptr(), roots.len(), known.raw()) }.map(owned_or_none)
}
