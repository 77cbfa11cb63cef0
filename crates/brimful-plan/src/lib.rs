#![forbid(unsafe_code)]
//! Schedules, balances, plans and splits: all that brimful decides before a tensor exists.
//!
//! Nothing in here needs libtorch, so it builds, and its tests run, in seconds. The library
//! `brimful` re-exports what most programs need of each module under the same name.
//!
//! | to | use |
//! | --- | --- |
//! | read and write numbers of bytes | [`bytes`] |
//! | cut a mini-batch into micro-batches | [`split`] |
//! | inspect, simulate or write a schedule | [`schedule`] |
//! | cut layers into stages | [`balance`] |
//! | choose balance, schedule and micro-batches | [`mod@plan`] |
//! | choose which stages to offload, and what each keeps or recomputes | [`plan::offload`] |
//!
//! A module uses only modules above it in this table.

pub mod balance;
mod bisect;
pub mod bytes;
pub mod plan;
pub mod schedule;
pub mod split;
