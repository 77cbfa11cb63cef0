//! Work to do when a scope ends, also by a panic.

/// Calls the closure when dropped.
#[must_use = "it is called at once where nobody keeps it"]
pub(crate) struct AtEnd<F: FnMut()>(pub(crate) F);

impl<F: FnMut()> Drop for AtEnd<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}
