//! Amount of data that a rank has sent.

use tch::Tensor;

use crate::batch::tensor_bytes;
use brimful_plan::bytes::Bytes;

/// Data that a rank has sent to others since it started: contents of tensors, without the short messages
/// around them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Number of bytes.
    pub sent: Bytes,
    /// Number of tensors.
    pub tensors: u64,
}

impl Traffic {
    pub(super) fn count(&mut self, tensor: &Tensor) {
        self.sent.0 += tensor_bytes(tensor);
        self.tensors += 1;
    }
}
