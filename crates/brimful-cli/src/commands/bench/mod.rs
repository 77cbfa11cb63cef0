//! `brimful bench`: speed and memory, side by side in one run.

mod arena;
mod auto;
mod columns;
mod compare;
mod convergence;
mod interrupt;
mod journal;
mod memory;
mod micro;
mod pipeline;
mod plot;
mod progress;
#[cfg(feature = "mpi")]
mod ranks;
mod results;
mod times;
mod work;
mod world;

use anyhow::Result;
use clap::Subcommand;

use crate::exit::Exit;

/// What can be measured.
#[derive(Debug, Subcommand)]
pub enum Bench {
    /// What counting memory costs: a ResNet-50 training step on the CPU, with an arena and without.
    Arena(arena::Options),
    /// Micro-batched training: the library against a hand-written loop, and what it keeps in memory.
    Micro(micro::Options),
    /// The automatic size against every size that could have been given, in limited memory.
    Auto(auto::Options),
    /// Full batch, micro-batches and stages, trained side by side: the same accuracy but for chance.
    Convergence(convergence::Options),
    /// The largest U-Net and AmoebaNet-D that fit devices of one size, in one piece and in stages.
    Memory(memory::Options),
    /// Pipelines: stages with a thread each against the same model on one thread, and the limits.
    Pipeline(pipeline::Options),
    /// A pipeline over the ranks of mpirun against the same pipeline in one process.
    World(world::Options),
    /// Data parallelism over processes, started by mpirun: all ranks against one.
    #[cfg(feature = "mpi")]
    Ranks(ranks::Options),
    /// Join our rows and the peers' into tables with ratios.
    Compare(compare::Options),
    /// Draw rows, ours and the peers'.
    Plot(plot::Options),
}

/// Runs one benchmark.
pub fn run(bench: &Bench) -> Result<Exit> {
    match bench {
        Bench::Arena(options) => arena::run(options)?,
        Bench::Convergence(options) => convergence::run(options)?,
        Bench::Memory(options) => memory::run(options)?,
        Bench::Micro(options) => micro::run(options)?,
        Bench::Auto(options) => auto::run(options)?,
        Bench::Pipeline(options) => pipeline::run(options)?,
        Bench::World(options) => world::run(options)?,
        #[cfg(feature = "mpi")]
        Bench::Ranks(options) => ranks::run(options)?,
        Bench::Compare(options) => compare::run(options)?,
        Bench::Plot(options) => plot::run(options)?,
    }
    Ok(Exit::Done)
}
