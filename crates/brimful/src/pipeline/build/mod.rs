//! Describes and builds a pipeline: its layers, devices and ranks.

mod balance;
mod builder;
mod exact;
mod homes;
mod layout;
mod roster;

pub use balance::BalanceBy;
pub use builder::Builder;
pub use homes::Homes;
pub(crate) use homes::{check_graphs_at_home, recompute_at_least};
pub(crate) use layout::{Export, StageLayout, StagePlan};
