//! Chooses how many layers each stage gets: the exact min-max partition.
//!
//! What the layers cost is measured by `brimful::balance::measure`, which needs libtorch, or given in
//! plain numbers:
//!
//! ```
//! # use brimful_plan as brimful;
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

mod bands;
mod error;
mod finest;
mod partition;
mod problem;
mod profile;
mod sizes;
mod transfer;

pub use error::BalanceError;
pub use finest::finest;
use problem::{BalanceGoal, PartitionProblem};
pub use problem::{Load, Slot};
pub(crate) use profile::peak_of_both;
pub use profile::{LayerCost, Profile, SharedParameters};
pub use sizes::Balance;

/// The balance whose slowest stage is as fast as can be; memory is not looked at.
///
/// # Errors
/// Where there are fewer layers than stages, or a time or speed is no sound number.
pub fn by_time(layers: &[Load], stages: &[Slot]) -> Result<Balance, BalanceError> {
    partition::solve(&PartitionProblem::new(layers, stages, BalanceGoal::Time)?)
}

/// The balance whose slowest stage is as fast as can be among those that fit.
///
/// # Errors
/// As [`by_time`], and where nothing fits.
pub fn by_time_within(layers: &[Load], stages: &[Slot]) -> Result<Balance, BalanceError> {
    partition::solve(&PartitionProblem::new(layers, stages, BalanceGoal::TimeWithin)?)
}

/// The balance whose fullest stage is as empty as can be: by the share of its memory where every
/// stage has a limit, by bytes otherwise.
///
/// # Errors
/// As [`by_time`].
pub fn by_bytes(layers: &[Load], stages: &[Slot]) -> Result<Balance, BalanceError> {
    partition::solve(&PartitionProblem::new(layers, stages, BalanceGoal::Bytes)?)
}
