//! Return values of a closure for a micro-batch: a loss, a loss with outputs, or a `Result` of them.

use std::error::Error as StdError;

use crate::batch::Batch;
use crate::loss::Loss;
use crate::{Error, Result};

/// Return value of a closure: a loss, a pair of a loss and outputs, or a `Result` of one of them.
pub trait IntoLoss {
    /// Outputs, joined in sample order; `()` for a bare loss.
    type Outputs: Batch + 'static;

    /// Splits it into loss and outputs.
    ///
    /// # Errors
    /// With the closure's own error.
    fn into_parts(self) -> Result<(Loss, Self::Outputs)>;
}

impl IntoLoss for Loss {
    type Outputs = ();

    fn into_parts(self) -> Result<(Loss, ())> {
        Ok((self, ()))
    }
}

impl<O: Batch + 'static> IntoLoss for (Loss, O) {
    type Outputs = O;

    fn into_parts(self) -> Result<(Loss, O)> {
        Ok(self)
    }
}

impl<R: IntoLoss, E: Into<Box<dyn StdError + Send + Sync>>> IntoLoss for Result<R, E> {
    type Outputs = R::Outputs;

    fn into_parts(self) -> Result<(Loss, R::Outputs)> {
        self.map_err(Error::of_closure)?.into_parts()
    }
}
