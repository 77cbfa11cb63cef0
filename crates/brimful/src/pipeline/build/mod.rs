//! Describes and builds a pipeline: its layers, devices and ranks.

mod balance;
mod builder;
mod building;
mod exact;
mod host;
mod offload;
mod plan_offload;
mod roster;
mod search;

pub use balance::BalanceBy;
pub use builder::Builder;
pub use offload::{Offload, is_offloadable};
pub(crate) use offload::{check_offloaded_graphs, recompute_at_least};
pub use plan_offload::{OffloadPlan, free_host_bytes, trained_share};
