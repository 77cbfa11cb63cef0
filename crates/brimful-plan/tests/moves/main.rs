//! Tests of moves between host and device while stages compute.

#![allow(clippy::unwrap_used)]

mod moving;
mod rules;
mod simulated;
