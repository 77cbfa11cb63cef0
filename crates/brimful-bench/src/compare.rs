//! `brimful-bench compare`: our results and the peers', joined into tables with ratios.

use std::path::PathBuf;

use anyhow::Result;
use brimful_cli::output;
use brimful_cli::setting::words;
use clap::Args;

use crate::results::Results;

/// Options of `brimful-bench compare`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  brimful-bench compare ours.jsonl peers.jsonl
  brimful-bench compare ours.jsonl peers.jsonl --markdown > table.md")]
pub(crate) struct CompareOptions {
    /// JSON lines of `brimful-bench … --json` or --into, and of the scripts in bench/peers
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Print Markdown
    #[arg(long, conflicts_with = "json")]
    markdown: bool,
    #[arg(long, help = words::JSON)]
    json: bool,
}

/// Joins and prints.
pub(crate) fn run(options: &CompareOptions) -> Result<()> {
    let results = Results::read(&options.files)?;
    if options.json {
        return output::line(&results.json().to_string());
    }
    let text = if options.markdown { results.for_markdown() } else { results.for_terminal() };
    output::line(&text)
}
