//! Leaves that a backward reaches besides the parameters, such as a batch that requires a gradient or the
//! variables of another store: summed as parameters are, or refused.

use brimful_torch::autograd::set_gradient;
use brimful_torch::gradients::collect;
use tch::Tensor;

use super::{Accumulator, fitting_gradient, is_summed_apart};
use crate::{Error, Result};

impl Accumulator {
    /// Adds a leaf that a backward has reached to this step's parameters, or refuses it. The backward has not
    /// run yet, and can start anew.
    ///
    /// Otherwise autograd would add to the leaf's gradient even if the step fails: twice after a retry, and before
    /// all denominators are known.
    pub(super) fn take_in(&mut self, mut leaf: Tensor) -> Result<()> {
        if !self.sums_others {
            return Err(Error::OtherLeaf { shape: leaf.size() });
        }
        if is_summed_apart(&leaf) && !self.apart {
            if self.in_place() {
                collect(&self.parameters, &mut self.sums.groups[0])?;
            }
            self.apart = true;
        }
        self.known.add([&leaf])?;
        let mut aside = fitting_gradient(&leaf)?;
        // A plain backward may have stored the leaf's gradient in the same memory as a parameter's.
        let meets = |other: &Tensor| aside.as_ref().is_some_and(|own| overlap(own, other));
        if self.aside.iter().flatten().any(meets) {
            aside = aside.map(|gradient| gradient.f_detach_copy()).transpose()?;
        }
        set_gradient(&mut leaf, None)?;
        self.aside.push(aside);
        self.parameters.push(leaf);
        self.sums.groups.iter_mut().for_each(|sum| sum.push(None));
        Ok(())
    }
}

/// Returns whether two dense tensors share memory.
fn overlap(one: &Tensor, other: &Tensor) -> bool {
    let range = |t: &Tensor| {
        let start = t.data_ptr() as usize;
        start..start + t.numel() * t.kind().elt_size_in_bytes()
    };
    let (one, other) = (range(one), range(other));
    one.start < other.end && other.start < one.end
}
