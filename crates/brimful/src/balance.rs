//! Measures what layers cost, and chooses how many of them each stage gets.
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

pub use crate::measure::{measure, measure_of_kind, measure_watched};
#[doc(inline)]
pub use brimful_plan::balance::{
    Balance, BalanceError, LayerCost, Load, Profile, SharedParameters, Slot, by_bytes, by_time,
    by_time_within, finest,
};
