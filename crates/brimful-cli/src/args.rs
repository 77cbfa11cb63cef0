//! The command line.

use clap::{Parser, Subcommand};

use crate::commands::{bench, doctor, plan, report, train, verify};

/// Trains batches and models that are bigger than your device's memory.
#[derive(Debug, Parser)]
#[command(name = "brimful", version, arg_required_else_help = true)]
#[command(after_help = "\
Examples:
  brimful demo                       a batch that does not fit, trained all the same
  brimful train --help               train a model on digits, images or text
  brimful plan --help                predict time and memory of a pipeline before it runs
  brimful report run.json            a page of what happened
  brimful verify --model gpt         full and split gradients, side by side
  brimful doctor                     what this machine has, and what is wrong with its set-up
  brimful bench pipeline             stages against one thread, beside what bubble and machine allow")]
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
    /// Train on a mini-batch that does not fit: a plain step runs out of memory, micro-batches do not.
    Demo,
    /// Train a model on data, in micro-batches, inside a memory limit.
    Train(train::Options),
    /// Predict the time, the bubble and the memory of a step before anything runs.
    Plan(plan::Options),
    /// Make a page of a run: timeline, memory, sizes, loss and rate.
    Report(report::Options),
    /// Compare the full batch's gradients with those of its micro-batches.
    Verify(verify::Options),
    /// Measure speed and memory, side by side in one run.
    #[command(subcommand)]
    Bench(bench::Bench),
}
