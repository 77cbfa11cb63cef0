//! Tests of transfers between host and device while stages compute.

mod fixtures;
mod rules;
mod saved;
mod simulated;
