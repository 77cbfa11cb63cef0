//! Balances layers over stages: the exact min-max partition.
//!
//! `brimful::balance::measure`, which needs libtorch, measures the costs of layers. The costs can also be given as
//! plain numbers:
//!
//! ```
//! use brimful_plan::balance::{self};
//! use brimful_plan::balance::{Load, Slot};
//!
//! let layers = vec![Load { time: 1.0, ..Load::default() }; 7];
//! let balance = balance::by_time(&layers, &[Slot::default(); 4])?;
//! assert_eq!(balance.sizes(), [1, 2, 2, 2]);
//! # Ok::<(), brimful_plan::balance::BalanceError>(())
//! ```
//!
//! Among all balances with the smallest possible maximum, the solver chooses the one that sends the fewest
//! bytes over the boundaries. Among several such balances it chooses an even one.

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

/// Returns the balance with the shortest time of the slowest stage; ignores memory.
///
/// # Errors
/// If there are fewer layers than stages, or a time or speed is invalid.
pub fn by_time(layers: &[Load], stages: &[Slot]) -> Result<Balance, BalanceError> {
    partition::solve(&PartitionProblem::new(layers, stages, BalanceGoal::Time)?)
}

/// Returns the balance with the shortest time of the slowest stage among those that fit.
///
/// # Errors
/// As for [`by_time`], and if nothing fits.
pub fn by_time_within(layers: &[Load], stages: &[Slot]) -> Result<Balance, BalanceError> {
    partition::solve(&PartitionProblem::new(layers, stages, BalanceGoal::TimeWithin)?)
}

/// Returns the balance with the least memory of the fullest stage: as a share of its limit if every stage
/// has one, in bytes otherwise.
///
/// # Errors
/// As for [`by_time`].
pub fn by_bytes(layers: &[Load], stages: &[Slot]) -> Result<Balance, BalanceError> {
    partition::solve(&PartitionProblem::new(layers, stages, BalanceGoal::Bytes)?)
}
