//! Weight decay for matrices only: norms and biases, of fewer than two dimensions, have none.

use super::{Optimizer, Parameter};
use crate::Result;

/// Group of the parameters that [`Optimizer::decay_only_matrices`] excludes from weight decay.
pub const NO_DECAY_GROUP: &str = "no-decay";

/// Number of dimensions from which a parameter has weight decay.
const MATRIX_DIMENSIONS: usize = 2;

impl Optimizer {
    /// Excludes every parameter of fewer than two dimensions, that is biases and the weights of norms, from
    /// weight decay: they become the group [`NO_DECAY_GROUP`]. Parameters of other groups keep their
    /// options. Does nothing if there are none.
    ///
    /// # Errors
    /// When a step was taken already, or the group exists. No group is created then.
    pub fn decay_only_matrices(&mut self) -> Result<()> {
        self.check_no_decay()?;
        let method = self.groups[0].method.without_decay();
        let is_member = |parameter: &Parameter| {
            parameter.group == 0 && parameter.tensor.dim() < MATRIX_DIMENSIONS
        };
        self.form_group(NO_DECAY_GROUP, is_member, method);
        Ok(())
    }

    /// Checks that the group can be created.
    pub(crate) fn check_no_decay(&self) -> Result<()> {
        self.check_group(NO_DECAY_GROUP, |_| false, &self.groups[0].method)
    }
}
