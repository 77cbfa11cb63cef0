//! Command line: the benchmarks, and the flags that all of them have.

use anyhow::Result;
use brimful_cli::args::Global;
use brimful_cli::command_line::CommandLine;
use brimful_cli::exit::{CODES, Exit};
use clap::{Parser, Subcommand};

#[cfg(feature = "mpi")]
use crate::ranks;
use crate::{
    arena, auto, convergence, finetune, kernels, loader, memory, micro, norms, offload, pipeline,
    ragged, split_backward, world,
};

/// Measures speed and memory of brimful, side by side in one run with what it is compared with.
#[derive(Debug, Parser)]
#[command(name = "brimful-bench", version, arg_required_else_help = true)]
#[command(after_help = format!("{EXAMPLES}\n\n{CODES}"))]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    bench: Benchmark,
    #[command(flatten)]
    global: Global,
}

const EXAMPLES: &str = "\
Examples:
  brimful-bench micro                micro-batches against a hand-written loop
  brimful-bench pipeline             stages against one thread, beside what bubble and machine allow
  brimful-bench micro --into micro   micro/ours.jsonl: rows for bench/tables";

/// Benchmarks.
#[derive(Debug, Subcommand)]
enum Benchmark {
    /// Cost of counting memory: a ResNet-50 training step on the CPU, with an arena and without.
    Arena(arena::ArenaOptions),
    /// Micro-batched training: the library against a hand-written loop, and peak memory.
    Micro(micro::MicroOptions),
    /// Automatic micro-batch size against every fixed size, in limited memory.
    Auto(auto::AutoOptions),
    /// Convergence of full batch, micro-batches and stages, trained side by side.
    Convergence(convergence::ConvergenceOptions),
    /// Fine-tuning of a Hugging Face folder, full or with LoRA, on the device and offloaded.
    Finetune(finetune::FinetuneOptions),
    /// A split backward (dX, then dW) against the whole backward of the same graph.
    SplitBackward(split_backward::SplitBackwardOptions),
    /// Custom kernels: a head's loss against libtorch's, and the cost of their first use.
    Kernels(kernels::KernelsOptions),
    /// Image loading: decoded, cropped, resized and normalised.
    Loader(loader::LoaderOptions),
    /// Largest U-Net and AmoebaNet-D that fit on devices of one size, on one device and in stages.
    Memory(memory::MemoryOptions),
    /// Exact BatchNorm statistics against deferred ones.
    Norms(norms::NormsOptions),
    /// An offloaded model against the same model on its device.
    Offload(offload::OffloadOptions),
    /// Pipelines: stages with a thread each against the same model on one thread, and the limits.
    Pipeline(pipeline::PipelineOptions),
    /// Sequences of different lengths, split by tokens against split by samples.
    Ragged(ragged::RaggedOptions),
    /// A pipeline over the ranks of mpirun against the same pipeline in one process.
    World(world::WorldOptions),
    /// Data parallelism over processes, started by mpirun: all ranks against one.
    #[cfg(feature = "mpi")]
    Ranks(ranks::RanksOptions),
}

impl CommandLine for BenchArgs {
    const PROGRAM: &'static str = "brimful-bench";

    fn global(&self) -> &Global {
        &self.global
    }

    fn run(&self) -> Result<Exit> {
        match &self.bench {
            Benchmark::Arena(options) => arena::run(options)?,
            Benchmark::Convergence(options) => convergence::run(options)?,
            Benchmark::Finetune(options) => finetune::run(options)?,
            Benchmark::SplitBackward(options) => split_backward::run(options)?,
            Benchmark::Kernels(options) => kernels::run(options)?,
            Benchmark::Loader(options) => loader::run(options)?,
            Benchmark::Memory(options) => memory::run(options)?,
            Benchmark::Micro(options) => micro::run(options)?,
            Benchmark::Auto(options) => auto::run(options)?,
            Benchmark::Norms(options) => norms::run(options)?,
            Benchmark::Offload(options) => offload::run(options)?,
            Benchmark::Pipeline(options) => pipeline::run(options)?,
            Benchmark::Ragged(options) => ragged::run(options)?,
            Benchmark::World(options) => world::run(options)?,
            #[cfg(feature = "mpi")]
            Benchmark::Ranks(options) => ranks::run(options)?,
        }
        Ok(Exit::Done)
    }
}

/// Checks both programs, so that a flag means the same in each.
#[cfg(test)]
mod tests {
    use super::*;
    use brimful_cli::args::BrimfulArgs;
    use clap::CommandFactory;
    use clap::builder::StyledStr;
    use std::collections::BTreeMap;

    /// Returns every command of both programs with its path, such as `brimful-bench micro`.
    fn commands() -> Vec<(String, clap::Command)> {
        let roots = [BrimfulArgs::command(), BenchArgs::command()].into_iter();
        let mut found: Vec<_> = roots.map(|root| (root.get_name().to_owned(), root)).collect();
        found.iter_mut().for_each(|(_, root)| root.build());
        let mut next = 0;
        while let Some((place, command)) = found.get(next).cloned() {
            let below = command.get_subcommands().filter(|below| below.get_name() != "help");
            found.extend(
                below.map(|below| (format!("{place} {}", below.get_name()), below.clone())),
            );
            next += 1;
        }
        found
    }

    #[test]
    fn the_definition_holds_together() {
        BenchArgs::command().debug_assert();
    }

    #[test]
    fn every_command_has_examples() {
        for (place, command) in commands() {
            let after = command.get_after_help().map(StyledStr::to_string).unwrap_or_default();
            assert!(after.starts_with("Examples:"), "{place}");
        }
    }

    #[test]
    fn a_flag_is_called_and_explained_the_same_everywhere() {
        let mut known = BTreeMap::new();
        for (place, command) in commands() {
            for flag in command.get_arguments() {
                let name = flag.get_long().unwrap_or("help").to_owned();
                if name == "help" {
                    continue;
                }
                let help = flag.get_help().map(StyledStr::to_string).unwrap_or_default();
                let said = help.split([':', '[']).next().unwrap_or_default().trim();
                let said = (said.to_owned(), flag.get_short());
                let (first, before) =
                    known.entry(name.clone()).or_insert_with(|| (said.clone(), place.clone()));
                assert_eq!(*first, said, "--{name} of {before} and {place}");
            }
        }
    }
}
