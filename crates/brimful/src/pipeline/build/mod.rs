//! Describes and builds a pipeline: its layers, devices and ranks.

mod balance;
mod builder;
mod exact;
mod layout;
mod offload;
mod roster;

pub use balance::BalanceBy;
pub use builder::Builder;
pub(crate) use layout::{Export, StageLayout, StagePlan};
pub use offload::Offload;
pub(crate) use offload::{check_offloaded_graphs, recompute_at_least};
