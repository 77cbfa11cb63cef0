//! What a closure may return for a micro-batch: a loss, a loss with outputs, or a `Result` of them.

use std::error::Error as StdError;

use tch::TchError;

use crate::batch::Batch;
use crate::error::ClosureError;
use crate::loss::Loss;
use crate::{Error, Result};

/// A loss, a pair of a loss and outputs, or a `Result` of one of them.
pub trait Outcome {
    /// What comes back joined in sample order; nothing for a bare loss.
    type Outputs: Batch + 'static;

    /// Takes it apart.
    ///
    /// # Errors
    /// With the closure's own error.
    fn into_parts(self) -> Result<(Loss, Self::Outputs)>;
}

impl Outcome for Loss {
    type Outputs = ();

    fn into_parts(self) -> Result<(Loss, ())> {
        Ok((self, ()))
    }
}

impl<O: Batch + 'static> Outcome for (Loss, O) {
    type Outputs = O;

    fn into_parts(self) -> Result<(Loss, O)> {
        Ok(self)
    }
}

impl<R: Outcome, E: Into<Box<dyn StdError + Send + Sync>>> Outcome for Result<R, E> {
    type Outputs = R::Outputs;

    fn into_parts(self) -> Result<(Loss, R::Outputs)> {
        self.map_err(own)?.into_parts()
    }
}

/// An error of the closure: one of ours or of libtorch as it is, another in its own words.
fn own(error: impl Into<Box<dyn StdError + Send + Sync>>) -> Error {
    let error = match error.into().downcast::<Error>() {
        Ok(ours) => return *ours,
        Err(other) => other,
    };
    match error.downcast::<TchError>() {
        Ok(torch) => Error::from(*torch),
        Err(other) => Error::Closure(ClosureError(other.into())),
    }
}
