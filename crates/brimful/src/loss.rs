//! A loss as numerator and denominator, so that a sum over micro-batches is the mini-batch's loss.
//!
//! A mean over a mini-batch is not the mean of its micro-batches' means: it is the sum of all
//! numerators over the sum of all denominators. So a [`Loss`] says what its value was divided by.
//!
//! | the full batch's loss | write |
//! | --- | --- |
//! | a mean over samples | `Loss::mean(t)` |
//! | a mean over tokens, or over the weights of classes | `Loss::mean_over(t, count)` |
//! | the same, where a micro-batch may have none of them | `Loss::ratio(sum, count)` |
//! | a sum | `Loss::sum(t)` |
//! | a term of the parameters alone | `Loss::once(t)` |
//! | several of them | `a + b * 0.1` |
//!
//! Three samples in micro-batches of two and one, with a penalty that counts once:
//!
//! ```
//! use brimful::{Loss, MicroBatcher, Size};
//! use tch::{Device, Kind, Tensor, nn};
//!
//! let store = nn::VarStore::new(Device::Cpu);
//! let weight = store.root().ones("weight", &[]);
//! let mut micro = MicroBatcher::new(&store, Size::Fixed(2));
//! let step = micro.backward(&Tensor::from_slice(&[1.0f32, 2.0, 6.0]), |x| {
//!     Loss::mean((x * &weight).mean(Kind::Float)) + Loss::once(weight.square()) * 0.5
//! })?;
//! assert_eq!(step.loss, 3.5);
//! assert_eq!(step.terms, [3.0, 0.5]);
//! # Ok::<(), brimful::Error>(())
//! ```

mod error;

use std::ops::{Add, Mul};

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

pub use error::{LossError, NonFiniteValue};

use crate::Result;

/// The loss of one micro-batch: terms, each with what it is a mean over.
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

/// What a term's value has been divided by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Over<W = Weight> {
    /// The number of samples in the micro-batch.
    Samples,
    /// A number or tensor that the user gives.
    Given(W),
    /// As before, but the division is still to come.
    Undivided(W),
    /// Nothing: a sum.
    Nothing,
    /// Nothing, and it does not depend on the samples: counted once a step.
    Once,
}

impl<W> Over<W> {
    /// What the user gives to divide by.
    pub(crate) fn weight(&self) -> Option<&W> {
        match self {
            Self::Given(weight) | Self::Undivided(weight) => Some(weight),
            _ => None,
        }
    }

    /// The same with what `f` makes of what the user gives.
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

/// What a mean is over: tokens, or the weights of classes.
#[derive(Debug)]
pub enum Weight {
    /// A number that the host knows.
    Number(f64),
    /// A tensor of one element, which need not be read before the step's end.
    Tensor(Tensor),
}

impl Loss {
    /// A mean over the samples of the micro-batch.
    pub fn mean(value: Tensor) -> Self {
        Self::of(value, Over::Samples)
    }

    /// A mean over something else: give how much of it the micro-batch has.
    ///
    /// For a cross-entropy that ignores padding it is the number of targets that are none; for one
    /// with class weights, the sum of the targets' weights.
    pub fn mean_over(value: Tensor, weight: impl Into<Weight>) -> Self {
        Self::of(value, Over::Given(weight.into()))
    }

    /// A sum, and what the mini-batch's sum is to be divided by. Unlike a mean it is well-defined
    /// for a micro-batch that has nothing to divide by, such as one of padding alone.
    pub fn ratio(sum: Tensor, weight: impl Into<Weight>) -> Self {
        Self::of(sum, Over::Undivided(weight.into()))
    }

    /// A sum over the samples.
    pub fn sum(value: Tensor) -> Self {
        Self::of(value, Over::Nothing)
    }

    /// A term that does not depend on the samples, such as a penalty on parameters. It counts once
    /// a step, however many micro-batches there are.
    pub fn once(value: Tensor) -> Self {
        Self::of(value, Over::Once)
    }

    fn of(value: Tensor, over: Over) -> Self {
        Self { terms: vec![Term { value, over, factor: 1.0 }] }
    }

    /// Its terms, if each is a scalar, and a backward can start from one (or may do without).
    pub(crate) fn into_terms(self, needs_gradient: bool) -> Result<Vec<Term>> {
        for (index, term) in self.terms.iter().enumerate() {
            term.check(index)?;
        }
        // Not from each: that of frozen parameters alone counts as a number.
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

    /// What of it the host has said, in words: its value and the weights of a tensor are not.
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

    /// The gradient to start this term's backward from; none for a term that has no part in this
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

    /// The same where the number is on the device, to be filled in later.
    pub(crate) fn root_gradient_of(&self, number: &Tensor) -> Result<Tensor> {
        match &self.over {
            Over::Given(Weight::Tensor(weight)) => {
                like(&self.double(weight)?.f_mul(&self.double(number)?)?, &self.value)
            }
            _ => like(number, &self.value),
        }
    }

    /// A number on the value's device, in f64 until it has been multiplied: f16 ends at 65,504, which
    /// is few tokens.
    fn double(&self, number: &Tensor) -> Result<Tensor> {
        let number = number.f_detach()?.f_to_device(self.value.device())?;
        Ok(number.f_to_kind(Kind::Double)?.f_view([1_i64])?)
    }

    /// What the root's gradient is, or, where the term's weight is on the device, is times that.
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

/// The number with the value's shape, type and device.
fn like(number: &Tensor, value: &Tensor) -> Result<Tensor> {
    let number = number.f_detach()?.f_to_device(value.device())?;
    Ok(number.f_to_kind(value.kind())?.f_view_as(value)?)
}

/// What a micro-batch counts for in its step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MicroBatchWeight {
    /// Its samples.
    pub(crate) samples: f64,
    /// What gradients are divided by until the true denominator is known: it keeps half-precision
    /// gradients from overflowing, and for a mean over one mini-batch it *is* the denominator.
    pub(crate) unit: f64,
    /// Whether it is the step's first.
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
