//! Chooses how many layers each stage gets: the exact min-max partition.
//!
//! What the layers cost is measured by [`Profile::measure`], or given in plain numbers:
//!
//! ```
//! use brimful::balance::{self, Load, Slot};
//!
//! let layers = vec![Load { time: 1.0, ..Load::default() }; 7];
//! let balance = balance::by_time(&layers, &[Slot::default(); 4])?;
//! assert_eq!(balance.sizes(), [1, 2, 2, 2]);
//! # Ok::<(), brimful::balance::BalanceError>(())
//! ```
//!
//! Of all balances with the smallest possible maximum, the one with the fewest bytes over the
//! boundaries is chosen, and among cuts of equal bytes the layers are spread evenly.

mod error;
mod measure;
mod partition;
mod problem;
mod profile;
mod subject;
mod transfer;

use std::fmt;
use std::ops::Range;

use serde::Serialize;

pub use error::BalanceError;
use problem::{Goal, Problem};
pub use profile::{Layer, Profile};

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
        let sum = sizes.iter().map(|size| *size as u128).sum();
        if sum != layers as u128 {
            return Err(BalanceError::WrongSum { sizes, sum, layers });
        }
        Ok(Self(sizes))
    }

    /// From the ends of the stages.
    fn from_ends(ends: &[usize]) -> Self {
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

/// What one layer asks of the stage that has it.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Load {
    /// Time of one micro-batch, on a device of speed 1.
    pub time: f64,
    /// Bytes that are there all the time.
    pub bytes: u64,
    /// Bytes of each micro-batch that is held.
    pub activation_bytes: u64,
    /// Bytes that go on to the next stage if the model is cut behind this layer.
    pub output_bytes: u64,
}

/// What one stage has to offer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Slot {
    /// How fast its device is; times are divided by it.
    pub speed: f64,
    /// How many bytes it may use; `None` is no limit.
    pub memory: Option<u64>,
    /// How many micro-batches it holds at one time.
    pub held: u64,
}

impl Default for Slot {
    /// Speed 1, no limit, one micro-batch.
    fn default() -> Self {
        Self { speed: 1.0, memory: None, held: 1 }
    }
}

/// The balance whose slowest stage is as fast as can be; memory is not looked at.
///
/// # Errors
/// Where there are fewer layers than stages, or a time or speed is no sound number.
pub fn by_time(layers: &[Load], stages: &[Slot]) -> Result<Balance, BalanceError> {
    partition::solve(&Problem::new(layers, stages, Goal::Time)?)
}

/// The balance whose slowest stage is as fast as can be among those that fit.
///
/// # Errors
/// As [`by_time`], and where nothing fits.
pub fn by_time_within(layers: &[Load], stages: &[Slot]) -> Result<Balance, BalanceError> {
    partition::solve(&Problem::new(layers, stages, Goal::TimeWithin)?)
}

/// The balance whose fullest stage is as empty as can be: by the share of its memory where every
/// stage has a limit, by bytes otherwise.
///
/// # Errors
/// As [`by_time`].
pub fn by_bytes(layers: &[Load], stages: &[Slot]) -> Result<Balance, BalanceError> {
    partition::solve(&Problem::new(layers, stages, Goal::Bytes)?)
}
