//! Balance: the number of layers of each stage.

use std::fmt;
use std::ops::Range;

use serde::Serialize;

use super::BalanceError;

/// Number of layers of each stage; every stage has at least one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Balance(Vec<usize>);

impl Balance {
    /// Creates a balance from its sizes, for a model of `layers` layers.
    ///
    /// # Errors
    /// If the sizes do not sum to `layers`, or one of them is 0.
    pub fn new(sizes: impl Into<Vec<usize>>, layers: usize) -> Result<Self, BalanceError> {
        let sizes = sizes.into();
        if sizes.is_empty() {
            return Err(BalanceError::NoStages);
        }
        if let Some(stage) = sizes.iter().position(|size| *size == 0) {
            return Err(BalanceError::EmptyStage { sizes, stage });
        }
        // 128 bits: users give the sizes, and their sum must not wrap around to the right one.
        let sum = sizes.iter().map(|size| *size as u128).sum();
        if sum != layers as u128 {
            return Err(BalanceError::WrongSum { sizes, sum, layers });
        }
        Ok(Self(sizes))
    }

    /// Creates a balance from the ends of the stages.
    pub(super) fn from_ends(ends: &[usize]) -> Self {
        let starts = std::iter::once(&0).chain(ends);
        Self(ends.iter().zip(starts).map(|(end, start)| end - start).collect())
    }

    /// Returns the number of layers of each stage.
    #[must_use]
    pub fn sizes(&self) -> &[usize] {
        &self.0
    }

    /// Returns the range of layers of each stage.
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
