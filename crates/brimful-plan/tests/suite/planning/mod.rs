//! Tests of balances, plans and offloading: pure code, so they share a program.

mod balance;
mod kept_stages;
mod offload;
mod plan;
