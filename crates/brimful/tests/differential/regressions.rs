//! Cases that once failed, as code. They run first.

use crate::script::Case;

pub fn cases() -> Vec<(&'static str, Case)> {
    Vec::new()
}
