//! One file a command.

pub mod bench;
pub mod demo;
pub mod doctor;
