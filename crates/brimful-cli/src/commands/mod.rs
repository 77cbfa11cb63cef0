//! One file a command.

pub(crate) mod bench;
pub(crate) mod completions;
pub(crate) mod demo;
pub(crate) mod doctor;
pub(crate) mod man;
pub(crate) mod plan;
pub(crate) mod report;
pub(crate) mod train;
pub(crate) mod verify;
