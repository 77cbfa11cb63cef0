//! Loss as numerator and denominator, so that a sum over micro-batches is the mini-batch's loss.
//!
//! A mean over a mini-batch is not the mean of its micro-batches' means: it is the sum of all numerators over
//! the sum of all denominators. So a [`Loss`] also holds the divisor of its value.
//!
//! | loss of the full batch | write |
//! | --- | --- |
//! | a mean over samples | `Loss::mean(t)` |
//! | a mean over tokens, or over the weights of classes | `Loss::mean_over(t, count)` |
//! | such a mean, where a micro-batch may have no weight at all | `Loss::ratio(sum, count)` |
//! | a sum | `Loss::sum(t)` |
//! | a term of the parameters alone | `Loss::once(t)` |
//! | several terms | `a + b * 0.1` |
//!
//! Three samples in micro-batches of two and one, with a penalty that counts once:
//!
//! ```
//! use brimful::{Loss, MicroBatcher, MicroBatches};
//! use tch::{Device, Kind, Tensor, nn};
//!
//! let store = nn::VarStore::new(Device::Cpu);
//! let weight = store.root().ones("weight", &[]);
//! let mut micro = MicroBatcher::new(&store, MicroBatches::Samples(2));
//! let step = micro.backward(&Tensor::from_slice(&[1.0f32, 2.0, 6.0]), |x| {
//!     Loss::mean((x * &weight).mean(Kind::Float)) + Loss::once(weight.square()) * 0.5
//! })?;
//! assert_eq!(step.loss, 3.5);
//! assert_eq!(step.terms, [3.0, 0.5]);
//! # Ok::<(), brimful::Error>(())
//! ```

mod error;

use std::error::Error as StdError;
use std::ops::{Add, Mul};

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

pub use error::LossError;

use crate::batch::Batch;
use crate::{Error, Result};

/// Loss of one micro-batch: terms with their denominators.
#[derive(Debug)]
pub struct Loss {
    terms: Vec<Term>,
}

#[derive(Debug)]
pub(crate) struct Term {
    pub(crate) value: Tensor,
    pub(crate) over: Over,
    pub(crate) factor: f64,
}

/// Denominator of a term.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Over<W = Weight> {
    /// The number of samples in the micro-batch.
    Samples,
    /// A number or tensor from the user.
    Given(W),
    /// A number or tensor from the user, by which the value is not divided yet.
    Undivided(W),
    /// None: a sum.
    Nothing,
    /// None, and independent of the samples: counted once per step.
    Once,
}

impl<W> Over<W> {
    /// Returns the user's denominator, if there is one.
    pub(crate) fn weight(&self) -> Option<&W> {
        match self {
            Self::Given(weight) | Self::Undivided(weight) => Some(weight),
            _ => None,
        }
    }

    /// Applies `f` to the user's denominator.
    pub(crate) fn map<V>(&self, f: impl FnOnce(&W) -> V) -> Over<V> {
        match self {
            Self::Samples => Over::Samples,
            Self::Given(weight) => Over::Given(f(weight)),
            Self::Undivided(weight) => Over::Undivided(f(weight)),
            Self::Nothing => Over::Nothing,
            Self::Once => Over::Once,
        }
    }
}

/// Denominator of a mean: a number of tokens, or a sum of class weights.
#[derive(Debug)]
pub enum Weight {
    /// A number on the host.
    Number(f64),
    /// A tensor of one element, which is not read before the step's end.
    Tensor(Tensor),
}

impl Loss {
    /// Creates a mean over the samples of the micro-batch.
    pub fn mean(value: Tensor) -> Self {
        Self::of(value, Over::Samples)
    }

    /// Creates a mean over a denominator other than the number of samples: `value` is already divided by `weight`,
    /// the micro-batch's own denominator.
    ///
    /// For a cross-entropy that ignores padding, the denominator is the number of targets that are not padding;
    /// for one with class weights, the sum of the targets' weights.
    pub fn mean_over(value: Tensor, weight: impl Into<Weight>) -> Self {
        Self::of(value, Over::Given(weight.into()))
    }

    /// Creates a mean from a sum that is not divided yet, and the micro-batch's share of the denominator. So the
    /// term is well-defined even for a micro-batch whose share is 0, such as one of padding only.
    pub fn ratio(sum: Tensor, weight: impl Into<Weight>) -> Self {
        Self::of(sum, Over::Undivided(weight.into()))
    }

    /// Creates a sum over the samples.
    pub fn sum(value: Tensor) -> Self {
        Self::of(value, Over::Nothing)
    }

    /// Creates a term that does not depend on the samples, such as a penalty on parameters. It counts once per
    /// step, however many micro-batches there are.
    pub fn once(value: Tensor) -> Self {
        Self::of(value, Over::Once)
    }

    fn of(value: Tensor, over: Over) -> Self {
        Self { terms: vec![Term { value, over, factor: 1.0 }] }
    }

    /// Returns the loss's terms. Fails if a term is not a scalar, or if a backward is needed and no term requires
    /// a gradient.
    pub(crate) fn into_terms(self, needs_gradient: bool) -> Result<Vec<Term>> {
        for (index, term) in self.terms.iter().enumerate() {
            term.check(index)?;
        }
        // One term is enough: a term of frozen parameters only adds to the loss.
        if needs_gradient && !self.terms.iter().any(|term| term.value.requires_grad()) {
            return Err(LossError::WithoutGradient { terms: self.terms.len() }.into());
        }
        Ok(self.terms)
    }
}

impl Term {
    fn check(&self, index: usize) -> Result<()> {
        if self.value.numel() != 1 {
            return Err(LossError::NotScalar { term: index, shape: self.value.size() }.into());
        }
        match self.over.weight() {
            Some(Weight::Tensor(weight)) if weight.numel() != 1 => {
                Err(LossError::WeightNotScalar { term: index, shape: weight.size() }.into())
            }
            _ => Ok(()),
        }
    }

    /// Describes the parts of the term that the host knows; values and weights in tensors are not among them.
    pub(crate) fn in_words(&self) -> String {
        let number = |weight: &Weight| match weight {
            Weight::Number(number) => number.to_string(),
            Weight::Tensor(_) => "a tensor's number".to_owned(),
        };
        let over = match &self.over {
            Over::Samples => "a mean over samples".to_owned(),
            Over::Given(weight) => format!("a mean over {}", number(weight)),
            Over::Undivided(weight) => format!("a sum over {}", number(weight)),
            Over::Nothing => "a sum".to_owned(),
            Over::Once => "a term that counts once".to_owned(),
        };
        format!("{over}, times {}", self.factor)
    }

    /// Returns the root gradient of this term's backward; `None` for a term that has no part in this
    /// micro-batch.
    pub(crate) fn root_gradient(&self, part: &MicroBatchWeight) -> Result<Option<Tensor>> {
        let Some(number) = self.root_number(part) else { return Ok(None) };
        Ok(Some(match &self.over {
            Over::Given(Weight::Tensor(weight)) => {
                like(&self.double(weight)?.f_mul_scalar(number)?, &self.value)?
            }
            _ => self.value.f_full_like(number)?,
        }))
    }

    /// Returns the root gradient for a number on the device, which a CUDA graph reads at each replay.
    pub(crate) fn root_gradient_of(&self, number: &Tensor) -> Result<Tensor> {
        match &self.over {
            Over::Given(Weight::Tensor(weight)) => {
                like(&self.double(weight)?.f_mul(&self.double(number)?)?, &self.value)
            }
            _ => like(number, &self.value),
        }
    }

    /// Converts a number to f64 on the value's device before it is multiplied: f16 ends at 65,504, and a
    /// micro-batch may have more tokens.
    fn double(&self, number: &Tensor) -> Result<Tensor> {
        let number = number.f_detach()?.f_to_device(self.value.device())?;
        Ok(number.f_to_kind(Kind::Double)?.f_view([1_i64])?)
    }

    /// Returns the factor of the root gradient that is known on the host; `None` for a term that has no part in
    /// this micro-batch. A weight on the device is not part of the factor.
    pub(crate) fn root_number(&self, part: &MicroBatchWeight) -> Option<f64> {
        let number = match &self.over {
            Over::Samples => part.samples / part.unit,
            // A mean over nothing is 0/0, and so is its gradient.
            Over::Given(Weight::Number(0.0)) => return None,
            Over::Given(Weight::Number(weight)) => weight / part.unit,
            Over::Given(Weight::Tensor(_)) | Over::Undivided(_) => 1.0 / part.unit,
            Over::Nothing => 1.0,
            Over::Once if part.first => 1.0,
            Over::Once => return None,
        };
        Some(number * self.factor)
    }
}

/// Converts the number to the value's shape, dtype and device.
fn like(number: &Tensor, value: &Tensor) -> Result<Tensor> {
    let number = number.f_detach()?.f_to_device(value.device())?;
    Ok(number.f_to_kind(value.kind())?.f_view_as(value)?)
}

/// Weight of a micro-batch in its step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MicroBatchWeight {
    /// Number of the micro-batch's samples.
    pub(crate) samples: f64,
    /// Divisor of gradients until the true denominator is known. It keeps half-precision gradients from
    /// overflowing, and for a mean over one mini-batch it *is* the denominator.
    pub(crate) unit: f64,
    /// True if the micro-batch is the first of the step.
    pub(crate) first: bool,
}

impl Add for Loss {
    type Output = Self;

    fn add(mut self, other: Self) -> Self {
        self.terms.extend(other.terms);
        self
    }
}

impl Mul<f64> for Loss {
    type Output = Self;

    fn mul(mut self, factor: f64) -> Self {
        self.terms.iter_mut().for_each(|term| term.factor *= factor);
        self
    }
}

impl From<f64> for Weight {
    fn from(number: f64) -> Self {
        Self::Number(number)
    }
}

impl From<i64> for Weight {
    fn from(number: i64) -> Self {
        Self::Number(number as f64)
    }
}

impl From<usize> for Weight {
    fn from(number: usize) -> Self {
        Self::Number(number as f64)
    }
}

impl From<Tensor> for Weight {
    fn from(tensor: Tensor) -> Self {
        Self::Tensor(tensor)
    }
}

impl From<&Tensor> for Weight {
    fn from(tensor: &Tensor) -> Self {
        Self::Tensor(tensor.shallow_clone())
    }
}

/// Return value of a closure: a loss, a pair of a loss and outputs, or a `Result` of one of them.
pub trait IntoLoss {
    /// Outputs, joined in sample order; `()` for a bare loss.
    type Outputs: Batch + 'static;

    /// Splits the return value into loss and outputs.
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

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    /// 65,536 is more than f16 can hold; a 64th of it is not.
    #[test]
    fn a_root_gradient_is_rounded_once_after_its_product() {
        let tokens = Tensor::from_slice(&[65_536_i64]);
        let value = Tensor::full([], 0.5, (Kind::Half, Device::Cpu));
        let terms = Loss::mean_over(value, tokens).into_terms(false).expect("a scalar");
        let part = MicroBatchWeight { samples: 1.0, unit: 64.0, first: true };
        let number = Tensor::from_slice(&[terms[0].root_number(&part).expect("it counts")]);
        let now = terms[0].root_gradient(&part).expect("a root").expect("it counts");
        let later = terms[0].root_gradient_of(&number).expect("a root");
        for root in [now, later] {
            assert_eq!((root.kind(), root.size()), (Kind::Half, Vec::new()));
            assert_eq!(root.double_value(&[]), 1024.0);
        }
    }
}
