//! `brimful report`: makes a page that any browser opens from a run file.

use std::path::PathBuf;

use anyhow::Result;
use brimful_report::Run;
use clap::Args;

use crate::exit::Exit;
use crate::files::{self, FlagFile};
use crate::{output, page};

/// Options of `brimful report`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  brimful train --record run.json               record a run
  brimful report run.json -o report.html        make its page
  brimful train --report report.html            both at once
  brimful plan -s 4 -m 8 --report plan.html     a page of simulated steps")]
pub struct ReportOptions {
    /// Run file, as written by train --record
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Output file: a page that any browser opens
    #[arg(long, short, value_name = "FILE", default_value = "report.html")]
    output: PathBuf,
}

impl ReportOptions {
    /// Lists the files that the command reads and writes.
    pub(crate) fn files(&self) -> Vec<FlagFile> {
        let files = [files::read("RUN", Some(&self.run)), files::written("-o", Some(&self.output))];
        files.into_iter().flatten().collect()
    }
}

/// Reads and checks the run, and writes its page.
pub(crate) fn run(options: &ReportOptions) -> Result<Exit> {
    page::write(&options.output, &Run::read(&options.run)?)?;
    output::line(&format!("wrote {}", options.output.display()))?;
    Ok(Exit::Done)
}
