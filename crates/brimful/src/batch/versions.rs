//! Whether somebody has changed a batch's tensors in place.

use tch::Tensor;

use super::Batch;
use crate::{Error, Result};

/// How often each tensor was changed so far; views of one memory count together. Tensors that do not
/// count, as those of inference mode, count as unchanged.
#[derive(Debug)]
pub(crate) struct Versions(Vec<Option<i64>>);

impl Versions {
    pub(crate) fn of(batch: &impl Batch) -> Self {
        let mut versions = Vec::new();
        batch.visit(&mut |leaf| versions.push(version(leaf.tensor())));
        Self(versions)
    }

    /// Refuses if one was changed since.
    pub(crate) fn check(&self, batch: &impl Batch) -> Result<()> {
        let now = Self::of(batch).0;
        match self.0.iter().zip(&now).position(|(before, now)| before != now) {
            Some(leaf) => Err(Error::BatchChanged { leaf }),
            None => Ok(()),
        }
    }
}

fn version(tensor: &Tensor) -> Option<i64> {
    tensor.f_internal_version().ok()
}
