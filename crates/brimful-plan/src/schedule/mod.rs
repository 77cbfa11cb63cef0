//! Schedules as data: an ordered list of actions for each device.
//!
//! A [`Schedule`] names an order; [`Schedule::actions`] makes the list of [`Action`]s of each device. The
//! same list is validated, simulated, printed, drawn, traced and executed:
//!
//! ```
//! use brimful_plan::schedule::{Costs, Recompute, Schedule, render, simulate};
//!
//! let actions = Schedule::OneFOneB.actions(4, 8, Recompute::Never)?;
//! let simulation = simulate(&actions, &Costs::ticks(4))?;
//! assert_eq!(simulation.makespan(), 33.0); // (m + s − 1)(F + B)
//! println!("{}", render::grid(&actions));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![cfg_attr(doc, doc = concat!("\n", include_str!("../../docs/1f1b-and-gpipe.svg")))]

mod action;
mod actions;
mod automatic;
mod breadth_first;
mod costs;
mod error;
mod host_link_use;
mod interleaved;
mod measured;
mod memory;
mod named;
mod one_f_one_b;
mod one_place;
mod recipe;
mod recompute;
pub mod render;
mod simulate;
mod text;
mod timeline;
mod transfers;
mod validate;
mod zero_bubble;
mod zero_bubble_v;

pub use action::{Action, ActionKind, DeviceId, MicroBatchId, StageId};
pub use actions::Actions;
pub(crate) use costs::is_time;
pub use costs::{Costs, HostLinkCost, LinkCost, StageCost};
pub use error::{BlockedDevice, CostError, Rule, ScheduleError};
pub use host_link_use::{Awaited, HostLinkUse, TransferSpan, WaitSpan};
pub use named::Schedule;
pub use recipe::ScheduleRecipe;
pub use recompute::Recompute;
pub use simulate::simulate;
pub use timeline::{DeviceUse, Simulation, Span};
pub use transfers::{
    Location, StageLocation, Transfer, TransferError, TransferKind, TransferRule, Transfers,
    simulate_transfers,
};
