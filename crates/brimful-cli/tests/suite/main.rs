//! Tests of the program as users run it, one module a subject. The report's page, and changed configs of folders, are
//! programs of their own.

mod config;
mod evaluate;
mod exit_codes;
mod frictions;
mod full_disk;
mod generate;
mod going_on;
mod images;
mod interruption;
mod long_runs;
mod memory_limit;
mod offload;
mod overwriting;
mod plan;
mod predict;
mod program;
#[cfg(feature = "mpi")]
mod ranks;
mod report;
mod streaming;
mod terminal;
mod train;
mod tuning_defaults;
