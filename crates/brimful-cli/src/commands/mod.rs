//! Commands of the program, one module each.

pub(crate) mod completions;
pub(crate) mod demo;
pub(crate) mod doctor;
pub(crate) mod evaluate;
pub(crate) mod generate;
pub(crate) mod man;
pub(crate) mod plan;
pub(crate) mod predict;
pub(crate) mod report;
pub mod train;
pub(crate) mod verify;
