//! Weight decay for matrices alone: norms and biases, of fewer than two dimensions, have none.

use super::{Optimizer, Parameter};
use crate::Result;

/// The group of the parameters that [`Optimizer::decay_only_matrices`] takes the decay from.
pub const NO_DECAY_GROUP: &str = "no-decay";

/// Parameters of so many dimensions are matrices, and shrink.
const MATRIX_DIMENSIONS: usize = 2;

impl Optimizer {
    /// Takes the weight decay from every parameter of fewer than two dimensions, which are the
    /// biases and the weights of norms: they become the group [`NO_DECAY_GROUP`]. Those of other
    /// groups keep the options that they were given. Where there are none, nothing is done.
    ///
    /// # Errors
    /// When a step was taken already, or there is such a group. No group is made then.
    pub fn decay_only_matrices(&mut self) -> Result<()> {
        self.check_no_decay()?;
        let method = self.groups[0].method.without_decay();
        let is_member = |parameter: &Parameter| {
            parameter.group == 0 && parameter.tensor.dim() < MATRIX_DIMENSIONS
        };
        self.form_group(NO_DECAY_GROUP, is_member, method);
        Ok(())
    }

    /// Whether the group can be made, if it has members.
    pub(crate) fn check_no_decay(&self) -> Result<()> {
        self.check_group(NO_DECAY_GROUP, |_| false, &self.groups[0].method)
    }
}
