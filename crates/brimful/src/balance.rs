//! Measures the costs of layers, and chooses the number of layers of each stage.
//!
//! ```
//! use brimful::balance::{self};
//! use brimful_plan::balance::{Load, Slot};
//!
//! let layers = vec![Load { time: 1.0, ..Load::default() }; 7];
//! let balance = balance::by_time(&layers, &[Slot::default(); 4])?;
//! assert_eq!(balance.sizes(), [1, 2, 2, 2]);
//! # Ok::<(), brimful::balance::BalanceError>(())
//! ```
//!
//! Among the balances with the smallest possible maximum, the one with the fewest bytes over the boundaries is
//! chosen; if several have the fewest bytes, the one that spreads the layers most evenly.

pub use crate::measure::{measure, measure_of_kind};
#[doc(inline)]
pub use brimful_plan::balance::{
    Balance, BalanceError, LayerCost, Profile, by_bytes, by_time, finest,
};
