//! Refuses sparse gradients by the parameter's name: neither sums nor optimizers support them.

use std::sync::{Arc, Mutex, PoisonError};

use brimful_torch::gradients::first_sparse;
use tch::Tensor;
use tch::nn::Variables;

use crate::{Error, Result};

/// Variables of a model, which give parameters their names.
pub(crate) type Named = Arc<Mutex<Variables>>;

/// Fails if any of these parameters has a sparse gradient. Reads nothing from a device.
pub(crate) fn check_dense(parameters: &[Tensor], named: &Named) -> Result<()> {
    match first_sparse(parameters) {
        Some(at) => Err(Error::SparseGradient { parameter: name_of(&parameters[at], named) }),
        None => Ok(()),
    }
}

/// Returns the parameter's name in the model.
pub(crate) fn name_of(parameter: &Tensor, named: &Named) -> String {
    let variables = named.lock().unwrap_or_else(PoisonError::into_inner);
    let mut all = variables.named_variables.iter();
    let found = all.find(|(_, tensor)| tensor.data_ptr() == parameter.data_ptr());
    found.map_or_else(|| "(no variable of the store)".into(), |(name, _)| name.clone())
}
