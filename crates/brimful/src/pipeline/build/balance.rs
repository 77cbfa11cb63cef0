//! Settings for the balance of the layers over the stages.

use tch::Tensor;

use crate::batch::{self, Batch};
use crate::update::Method;
use brimful_plan::balance;

/// Balance of the layers over the stages: given, or found by measurement.
///
/// `[3, 4]` is a balance, as is a `Vec` and a [`balance::Balance`].
#[derive(Debug, Default)]
pub struct BalanceBy {
    pub(super) choice: Choice,
    /// Optimizer whose state is counted, if any.
    pub(super) method: Option<Method>,
}

/// Way to find a balance.
#[derive(Debug, Default)]
pub(super) enum Choice {
    #[default]
    Even,
    Given(Vec<usize>),
    ByTime(Vec<Tensor>),
    ByBytes(Vec<Tensor>),
}

impl BalanceBy {
    /// Makes the slowest stage as fast as possible, within the devices' limits. Measures the layers on the first
    /// device, with parameters of the [pipeline's dtype](crate::pipeline::Builder::kind) and with `sample`, which
    /// has the size and the shapes of a micro-batch.
    pub fn by_time(sample: &impl Batch) -> Self {
        Choice::ByTime(leaves(sample)).into()
    }

    /// Minimizes the memory of the stage that needs the most: parameters, their gradients, an
    /// [optimizer](BalanceBy::optimizer)'s state, and the activations that the schedule holds. Measures as
    /// [`BalanceBy::by_time`] does.
    pub fn by_bytes(sample: &impl Batch) -> Self {
        Choice::ByBytes(leaves(sample)).into()
    }

    /// Counts this optimizer's state as memory of the layers: with Adam, twice the parameters' own bytes, and more
    /// in half precision.
    #[must_use]
    pub fn optimizer(self, config: impl Into<Method>) -> Self {
        Self { method: Some(config.into()), ..self }
    }
}

impl BalanceBy {
    /// Returns whether no balance was set.
    pub(super) fn is_even(&self) -> bool {
        matches!(self.choice, Choice::Even)
    }

    /// Returns the number of stages, if the balance is given in numbers.
    pub(super) fn stages(&self) -> Option<usize> {
        match &self.choice {
            Choice::Given(sizes) => Some(sizes.len()),
            _ => None,
        }
    }
}

impl<const N: usize> From<[usize; N]> for BalanceBy {
    fn from(sizes: [usize; N]) -> Self {
        Choice::Given(sizes.into()).into()
    }
}

impl From<Vec<usize>> for BalanceBy {
    fn from(sizes: Vec<usize>) -> Self {
        Choice::Given(sizes).into()
    }
}

impl From<&balance::Balance> for BalanceBy {
    fn from(balance: &balance::Balance) -> Self {
        Choice::Given(balance.sizes().to_vec()).into()
    }
}

impl From<balance::Balance> for BalanceBy {
    fn from(balance: balance::Balance) -> Self {
        (&balance).into()
    }
}

impl From<Choice> for BalanceBy {
    fn from(choice: Choice) -> Self {
        Self { choice, method: None }
    }
}

fn leaves(sample: &impl Batch) -> Vec<Tensor> {
    batch::tensors(sample).into_iter().map(Tensor::shallow_clone).collect()
}
