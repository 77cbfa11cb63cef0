//! `brimful-bench plot`: our results and the peers' as a picture.

use std::path::PathBuf;

use anyhow::Result;
use brimful_cli::output;
use clap::Args;

use crate::results::Results;

/// Options of `brimful-bench plot`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  brimful-bench plot ours.jsonl peers.jsonl -o plot.svg")]
pub(crate) struct PlotOptions {
    /// JSON lines of `brimful-bench … --json` or --into, and of the scripts in bench/peers
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Output file: an SVG
    #[arg(long, short, value_name = "FILE")]
    output: PathBuf,
}

/// Reads and draws.
pub(crate) fn run(options: &PlotOptions) -> Result<()> {
    let picture = Results::read(&options.files)?.svg();
    output::file(&options.output, &picture)
}
