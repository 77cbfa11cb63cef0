//! Program `brimful-bench`: speed and memory, side by side in one run.

#![deny(unsafe_code)]

mod arena;
mod args;
mod auto;
mod columns;
mod convergence;
mod finetune;
mod gradients;
mod host_memory;
mod interrupt;
mod journal;
mod kernels;
mod loader;
mod memory;
mod micro;
mod norms;
mod offload;
mod pipeline;
mod ragged;
#[cfg(feature = "mpi")]
mod ranks;
mod split_backward;
mod staged;
mod steady;
mod timed;
mod times;
mod tuned;
mod turns;
mod work;
mod world;

use brimful_cli::command_line;

use args::BenchArgs;

fn main() {
    command_line::run::<BenchArgs>();
}
