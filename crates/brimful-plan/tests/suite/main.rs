//! Tests of schedules and plans, one module a subject.

#![allow(clippy::unwrap_used)]

mod automatic;
mod letters;
mod planning;
mod schedule_errors;
mod schedule_grids;
mod schedule_reference;
mod schedule_rules;
mod transfers;
