//! A balance: how many layers each stage has.

use std::fmt;
use std::ops::Range;

use serde::Serialize;

use super::BalanceError;

/// How many layers each stage has; every stage at least one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Balance(Vec<usize>);

impl Balance {
    /// Takes the numbers for a model of `layers` layers.
    ///
    /// # Errors
    /// Where they do not sum to `layers`, or one is 0.
    pub fn new(sizes: impl Into<Vec<usize>>, layers: usize) -> Result<Self, BalanceError> {
        let sizes = sizes.into();
        if sizes.is_empty() {
            return Err(BalanceError::NoStages);
        }
        if let Some(stage) = sizes.iter().position(|size| *size == 0) {
            return Err(BalanceError::EmptyStage { sizes, stage });
        }
        // 128 bits: the numbers are a user's, and their sum must not wrap round to the right one.
        let sum = sizes.iter().map(|size| *size as u128).sum();
        if sum != layers as u128 {
            return Err(BalanceError::WrongSum { sizes, sum, layers });
        }
        Ok(Self(sizes))
    }

    /// From the ends of the stages.
    pub(super) fn from_ends(ends: &[usize]) -> Self {
        let starts = std::iter::once(&0).chain(ends);
        Self(ends.iter().zip(starts).map(|(end, start)| end - start).collect())
    }

    /// The number of layers of each stage.
    #[must_use]
    pub fn sizes(&self) -> &[usize] {
        &self.0
    }

    /// The layers of each stage.
    pub fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        self.0.iter().scan(0, |end, size| {
            let start = *end;
            *end += size;
            Some(start..*end)
        })
    }
}

impl fmt::Display for Balance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{:?}", self.0))
    }
}
