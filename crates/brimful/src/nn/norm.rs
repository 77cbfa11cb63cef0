//! LayerNorm and RMSNorm, with an optional fused residual.

use std::borrow::Borrow;

use brimful_torch::norm::{RowNorm, add_norm, norm, norm_beside};
use tch::Tensor;
use tch::nn::{self, Init, Module};

use crate::Result;
use crate::nn::error::NnError;
use crate::nn::kernels::reported;

/// Layer that normalises each row: by its mean and variance ([`layer_norm`]), or by the root of its mean square
/// ([`rms_norm`]).
#[derive(Debug)]
pub struct Norm {
    width: i64,
    weight: Tensor,
    bias: Option<Tensor>,
    eps: f64,
    root_mean_square: bool,
}

/// Default epsilon of variances, as in tch.
const LAYER_NORM_EPS: f64 = 1e-5;
/// Default epsilon of mean squares.
const RMS_NORM_EPS: f64 = 1e-6;

/// Creates a LayerNorm over the last dimension, with the same names and initial values as tch's LayerNorm.
pub fn layer_norm<'a>(path: impl Borrow<nn::Path<'a>>, width: i64) -> Norm {
    layer_norm_with(path, width, LAYER_NORM_EPS)
}

/// Creates a LayerNorm with another epsilon.
pub fn layer_norm_with<'a>(path: impl Borrow<nn::Path<'a>>, width: i64, eps: f64) -> Norm {
    let path = path.borrow();
    let weight = path.var("weight", &[width], Init::Const(1.0));
    let bias = Some(path.var("bias", &[width], Init::Const(0.0)));
    Norm { width, weight, bias, eps, root_mean_square: false }
}

/// Creates an RMSNorm over the last dimension.
pub fn rms_norm<'a>(path: impl Borrow<nn::Path<'a>>, width: i64) -> Norm {
    rms_norm_with(path, width, RMS_NORM_EPS)
}

/// Creates an RMSNorm with another epsilon.
pub fn rms_norm_with<'a>(path: impl Borrow<nn::Path<'a>>, width: i64, eps: f64) -> Norm {
    let weight = path.borrow().var("weight", &[width], Init::Const(1.0));
    Norm { width, weight, bias: None, eps, root_mean_square: true }
}

impl Norm {
    /// Normalises the rows of `x`.
    ///
    /// # Errors
    ///
    /// When the last dimension differs from the layer's.
    pub fn f_forward(&self, x: &Tensor) -> Result<Tensor> {
        self.check(x, None)?;
        reported(norm(x, self.how()))
    }

    /// Normalises the rows of `x`, and returns a second use of `x` before the result. If later layers use the
    /// returned `x`, the norm's own backward pass adds the gradients of both uses.
    ///
    /// # Errors
    ///
    /// When the last dimension differs from the layer's.
    pub fn f_forward_beside(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        self.check(x, None)?;
        reported(norm_beside(x, self.how()))
    }

    /// Calls [`f_forward_beside`](Self::f_forward_beside), for forwards that cannot return errors.
    ///
    /// # Panics
    ///
    /// If [`Self::f_forward_beside`] fails.
    pub fn forward_beside(&self, x: &Tensor) -> (Tensor, Tensor) {
        self.f_forward_beside(x).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Adds the residual and normalises the sum; returns the sum, then the result.
    ///
    /// # Errors
    ///
    /// When the last dimension differs from the layer's, or `x` and the residual differ in shape.
    pub fn f_forward_add(&self, x: &Tensor, residual: &Tensor) -> Result<(Tensor, Tensor)> {
        self.check(x, Some(residual))?;
        reported(add_norm(x, residual, self.how()))
    }

    /// Calls [`f_forward_add`](Self::f_forward_add), for forwards that cannot return errors.
    ///
    /// # Panics
    ///
    /// If [`Self::f_forward_add`] fails.
    pub fn forward_add(&self, x: &Tensor, residual: &Tensor) -> (Tensor, Tensor) {
        self.f_forward_add(x, residual).unwrap_or_else(|error| panic!("{error}"))
    }

    fn how(&self) -> RowNorm<'_> {
        let Self { weight, bias, eps, root_mean_square, .. } = self;
        RowNorm {
            weight: Some(weight),
            bias: bias.as_ref(),
            eps: *eps,
            root_mean_square: *root_mean_square,
        }
    }

    fn check(&self, x: &Tensor, residual: Option<&Tensor>) -> Result<()> {
        let shape = x.size();
        let residual = residual.map(Tensor::size);
        let fits = shape.last() == Some(&self.width);
        if fits && residual.as_ref().is_none_or(|other| *other == shape) {
            return Ok(());
        }
        Err(NnError::NormShape { width: self.width, shape, residual }.into())
    }
}

impl Module for Norm {
    fn forward(&self, x: &Tensor) -> Tensor {
        self.f_forward(x).unwrap_or_else(|error| panic!("{error}"))
    }
}
