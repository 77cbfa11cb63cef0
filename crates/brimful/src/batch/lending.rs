//! Micro-batches that are views of the user's mini-batch, lent to a closure or layer that must not change them.
//!
//! A closure that changes its micro-batch in place (`x /= 255`) would change the mini-batch, and change it
//! again at every rerun. libtorch's version counters show such a change. The first micro-batch that a borrower
//! gets is a copy, so that the change is found before it affects the mini-batch.

use std::any::TypeId;
use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use tch::Tensor;

use super::Batch;
use super::BatchError;
use crate::Result;

/// Type of a closure or layer that borrows micro-batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Borrower(TypeId);

impl Borrower {
    pub(crate) fn of<F>(_: &F) -> Self {
        Self::of_type::<F>()
    }

    pub(crate) fn of_type<F: ?Sized>() -> Self {
        Self(typeid::of::<F>())
    }
}

/// Borrowers that have left their first micro-batch unchanged. Clones share the list.
#[derive(Debug, Clone, Default)]
pub(crate) struct Borrowers(Arc<Mutex<HashSet<Borrower>>>);

impl Borrowers {
    pub(crate) fn knows(&self, borrower: Borrower) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains(&borrower)
    }

    /// Adds a borrower that has left its first micro-batch unchanged.
    pub(crate) fn trust(&self, borrower: Borrower) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(borrower);
    }
}

/// Lender of micro-batches to one borrower, one at a time.
#[derive(Debug, Default)]
pub(crate) struct Lender {
    has_lent: bool,
    /// Tensors of the micro-batch that is lent, and their versions when it was lent.
    lent: Vec<Tensor>,
    before: Versions,
}

impl Lender {
    /// Creates a lender. A borrower that is not known gets a copy first.
    pub(crate) fn to(is_known: bool) -> Self {
        Self { has_lent: is_known, ..Self::default() }
    }

    /// Returns the micro-batch for the borrower.
    pub(crate) fn lend<B: Batch>(&mut self, micro_batch: B) -> Result<B> {
        let lent = if self.has_lent { micro_batch } else { copied(&micro_batch)? };
        self.has_lent = true;
        self.lent = super::tensors(&lent).into_iter().map(Tensor::shallow_clone).collect();
        self.before = Versions::of(&self.lent);
        Ok(lent)
    }

    /// Returns the borrower's result.
    ///
    /// # Errors
    ///
    /// When the borrower has changed the micro-batch, even if the borrower has also failed: a changed mini-batch
    /// makes every retry wrong. Otherwise with the borrower's own error.
    pub(crate) fn take_back<T>(&mut self, result: Result<T>) -> Result<T> {
        let lent = std::mem::take(&mut self.lent);
        self.before.check(&lent)?;
        result
    }
}

/// Version counters of some tensors; views of one memory count together. Tensors without a counter, such as
/// those of inference mode, count as unchanged.
#[derive(Debug, Default)]
pub(crate) struct Versions(Vec<Option<i64>>);

impl Versions {
    pub(crate) fn of<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> Self {
        Self(tensors.into_iter().map(|tensor| tensor.f_internal_version().ok()).collect())
    }

    /// Returns the index of the first of these tensors that has changed since the counters were read.
    pub(crate) fn changed<'a>(
        &self,
        tensors: impl IntoIterator<Item = &'a Tensor>,
    ) -> Option<usize> {
        let now = Self::of(tensors).0;
        self.0.iter().zip(&now).position(|(before, now)| before != now)
    }

    /// Fails if one of these tensors has changed since the counters were read.
    pub(crate) fn check<'a>(&self, tensors: impl IntoIterator<Item = &'a Tensor>) -> Result<()> {
        self.changed(tensors).map_or(Ok(()), |leaf| Err(BatchError::Changed { leaf }.into()))
    }
}

/// Copies the micro-batch to memory of its own. The copy is differentiable.
pub(crate) fn copied<B: Batch>(micro_batch: &B) -> Result<B> {
    micro_batch.map(&mut |leaf| copy_of(leaf.tensor()))
}

/// Copies the tensor to memory of its own.
pub(crate) fn copy_of(tensor: &Tensor) -> Result<Tensor> {
    // `to` with `copy`: differentiable, and in the same memory format.
    Ok(tensor.f_to_dtype(tensor.kind(), false, true)?)
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;
    use crate::Error;

    #[test]
    fn the_first_borrower_that_changes_what_it_gets_is_refused_before_the_batch_has_changed() {
        let batch = Tensor::ones([4, 2], (Kind::Float, Device::Cpu));
        let (mut lender, slice) = (Lender::default(), |start| batch.narrow(0, start, 2));
        let (_, mut x) = lender.lend((batch.copy(), slice(0))).expect("a copy");
        let _doubled = x.g_mul_scalar_(2.0);
        let error = lender.take_back(Ok(()));
        assert_eq!(error.expect_err("changed"), Error::Batch(BatchError::Changed { leaf: 1 }));
        assert_eq!(batch, batch.ones_like());
        drop(lender.lend(slice(2)).expect("a view") + 1.0);
        lender.take_back(Ok(())).expect("left as it was");
        // Later ones are views: the change shows, and is reported even if something else has failed.
        let _doubled = lender.lend(slice(2)).expect("a view").g_mul_scalar_(2.0);
        let error = lender.take_back(Err::<(), _>(Error::Batch(BatchError::Empty)));
        assert_eq!(error.expect_err("changed"), Error::Batch(BatchError::Changed { leaf: 0 }));
    }

    #[test]
    fn a_copy_hands_its_gradient_back() {
        let x = Tensor::ones([4], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let lent = Lender::default().lend(x.narrow(0, 0, 2)).expect("a copy");
        (lent * 3.0).sum(Kind::Float).backward();
        assert_eq!(Vec::<f32>::try_from(x.grad()).expect("a gradient"), [3.0, 3.0, 0.0, 0.0]);
    }
}
