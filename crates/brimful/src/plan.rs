//! Plans: balance, schedule, micro-batches, recomputation and offload, chosen before anything runs.
//!
//! [`plan`] answers a [`Request`], which has the layers' measured costs
//! ([`balance::measure`](crate::balance::measure)) and the devices' memory.
//! [`Builder::plan`](crate::pipeline::Builder::plan) builds a row of the answer.

#[doc(inline)]
pub use brimful_plan::plan::{Plan, PlanChoice, PlanDevice, PlanError, PlanRow, Request, plan};
