//! Describes and builds a pipeline: its layers, devices and ranks.

mod balance;
mod builder;
mod exact;
mod offload;
mod roster;
mod stage_layout;

pub use balance::BalanceBy;
pub use builder::Builder;
pub use offload::Offload;
pub(crate) use offload::{check_offloaded_graphs, recompute_at_least};
pub(crate) use stage_layout::{Export, StageLayout, StagePlan};
