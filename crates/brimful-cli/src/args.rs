//! The command line.

use clap::{Parser, Subcommand};

use crate::commands::{bench, doctor};

/// Trains batches and models that are bigger than your device's memory.
#[derive(Debug, Parser)]
#[command(name = "brimful", version, arg_required_else_help = true)]
#[command(after_help = "\
Examples:
  brimful doctor            what this machine has, and what is wrong with its set-up
  brimful doctor --json     the same, for programs
  brimful demo              a step that runs out of memory, caught, and one that fits
  brimful bench arena       what counting memory costs, on a ResNet-50 training step
  brimful bench micro       micro-batches by brimful and by a hand-written loop: speed, memory")]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What the program can do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Say what this machine has, what is wrong with its set-up, and how to mend it.
    Doctor(doctor::Options),
    /// Show a step that runs out of memory, is caught, and a smaller one that fits.
    Demo,
    /// Measure speed and memory, side by side in one run.
    #[command(subcommand)]
    Bench(bench::Bench),
}
