//! LayerNorm and RMSNorm that can add a residual on the way.

use std::borrow::Borrow;

use brimful_torch::norm::{RowNorm, add_norm, norm, norm_beside};
use tch::Tensor;
use tch::nn::{self, Init, Module};
use thiserror::Error;

use crate::Result;
use crate::nn::kernels::told;

/// An input that a LayerNorm or RMSNorm layer is not made for.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("a norm of {width} columns takes an input of … × {width}, but got the shape {shape:?}{residual}",
    residual = residual.as_ref().map(|shape| format!(" with a residual of {shape:?}")).unwrap_or_default())]
#[non_exhaustive]
pub struct NormError {
    /// The layer's columns.
    pub width: i64,
    /// The input's shape.
    pub shape: Vec<i64>,
    /// The residual's, if there was one.
    pub residual: Option<Vec<i64>>,
}

/// Norms each row by its mean and variance: a weight, a bias.
pub type LayerNorm = NormWith<false>;

/// Norms each row by the root of its mean square: a weight.
pub type RmsNorm = NormWith<true>;

/// What [`LayerNorm`] and [`RmsNorm`] have in common.
#[derive(Debug)]
pub struct NormWith<const ROOT_MEAN_SQUARE: bool> {
    width: i64,
    weight: Tensor,
    bias: Option<Tensor>,
    eps: f64,
}

/// What is added to variances where nobody says otherwise, as tch has it.
const LAYER_NORM_EPS: f64 = 1e-5;
/// What is added to mean squares where nobody says otherwise.
const RMS_NORM_EPS: f64 = 1e-6;

/// A LayerNorm over the last dimension, with the names and the start of tch's own.
pub fn layer_norm<'a>(path: impl Borrow<nn::Path<'a>>, width: i64) -> LayerNorm {
    layer_norm_with(path, width, LAYER_NORM_EPS)
}

/// The same with another number added to variances.
pub fn layer_norm_with<'a>(path: impl Borrow<nn::Path<'a>>, width: i64, eps: f64) -> LayerNorm {
    let path = path.borrow();
    let weight = path.var("weight", &[width], Init::Const(1.0));
    let bias = Some(path.var("bias", &[width], Init::Const(0.0)));
    NormWith { width, weight, bias, eps }
}

/// An RMSNorm over the last dimension.
pub fn rms_norm<'a>(path: impl Borrow<nn::Path<'a>>, width: i64) -> RmsNorm {
    rms_norm_with(path, width, RMS_NORM_EPS)
}

/// The same with another number added to mean squares.
pub fn rms_norm_with<'a>(path: impl Borrow<nn::Path<'a>>, width: i64, eps: f64) -> RmsNorm {
    let weight = path.borrow().var("weight", &[width], Init::Const(1.0));
    NormWith { width, weight, bias: None, eps }
}

impl<const ROOT_MEAN_SQUARE: bool> NormWith<ROOT_MEAN_SQUARE> {
    /// Norms the rows of `x`.
    ///
    /// # Errors
    /// When the last dimension is another than the layer's.
    pub fn f_forward(&self, x: &Tensor) -> Result<Tensor> {
        self.check(x, None)?;
        told(norm(x, self.how()))
    }

    /// Norms the rows of `x`, and gives `x` beside them, first: who goes on with both uses this one, and
    /// has their two gradients added in the norm's own pass.
    ///
    /// # Errors
    /// When the last dimension is another than the layer's.
    pub fn f_forward_beside(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        self.check(x, None)?;
        told(norm_beside(x, self.how()))
    }

    /// The same, for forwards that cannot fail.
    ///
    /// # Panics
    /// Where [`Self::f_forward_beside`] fails.
    pub fn forward_beside(&self, x: &Tensor) -> (Tensor, Tensor) {
        self.f_forward_beside(x).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Adds the residual, and norms the sum: gives both, the sum first.
    ///
    /// # Errors
    /// When the last dimension is another than the layer's, or the two differ in shape.
    pub fn f_forward_add(&self, x: &Tensor, residual: &Tensor) -> Result<(Tensor, Tensor)> {
        self.check(x, Some(residual))?;
        told(add_norm(x, residual, self.how()))
    }

    /// The same, for forwards that cannot fail.
    ///
    /// # Panics
    /// Where [`Self::f_forward_add`] fails.
    pub fn forward_add(&self, x: &Tensor, residual: &Tensor) -> (Tensor, Tensor) {
        self.f_forward_add(x, residual).unwrap_or_else(|error| panic!("{error}"))
    }

    fn how(&self) -> RowNorm<'_> {
        let (weight, bias) = (Some(&self.weight), self.bias.as_ref());
        RowNorm { weight, bias, eps: self.eps, root_mean_square: ROOT_MEAN_SQUARE }
    }

    fn check(&self, x: &Tensor, residual: Option<&Tensor>) -> Result<()> {
        let shape = x.size();
        let residual = residual.map(Tensor::size);
        let fits = shape.last() == Some(&self.width);
        if fits && residual.as_ref().is_none_or(|other| *other == shape) {
            return Ok(());
        }
        Err(NormError { width: self.width, shape, residual }.into())
    }
}

impl<const ROOT_MEAN_SQUARE: bool> Module for NormWith<ROOT_MEAN_SQUARE> {
    fn forward(&self, x: &Tensor) -> Tensor {
        self.f_forward(x).unwrap_or_else(|error| panic!("{error}"))
    }
}
