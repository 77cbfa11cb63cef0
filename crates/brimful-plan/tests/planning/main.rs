//! Balances, plans and homes: pure code, so its tests share a program.

#![allow(clippy::unwrap_used)]

mod balance;
mod homes;
mod kept_stages;
mod plan;
