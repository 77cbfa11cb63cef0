//! Tests of transfers between host and device while stages compute.

#![allow(clippy::unwrap_used)]

mod fixtures;
mod rules;
mod saved;
mod simulated;
