//! The options of a model that is cut into stages.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use brimful::schedule::{Recompute, Schedule};
use clap::Args;

use crate::exit::wrong_use;
use crate::setting::{self, words};

/// How the model is cut over devices.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "A model that does not fit, in stages")]
pub(crate) struct Stages {
    #[arg(long, short = 's', value_name = "S", value_parser = words::count, help = words::STAGES)]
    pub(crate) stages: Option<usize>,
    #[arg(long, value_name = "NAME", value_parser = setting::schedule, help = words::SCHEDULE)]
    #[arg(default_value_t = Schedule::OneFOneB, requires = "stages")]
    pub(crate) schedule: Schedule,
    #[arg(long, value_name = "WHEN", value_parser = setting::recompute, help = words::RECOMPUTE)]
    #[arg(default_value_t = Recompute::Never, requires = "stages")]
    pub(crate) recompute: Recompute,
    /// Write a step's actions to this file, which ui.perfetto.dev opens: the last step
    #[arg(long, value_name = "FILE", requires = "stages")]
    pub(crate) trace: Option<PathBuf>,
}

impl Stages {
    /// How many devices there are; on a CPU, threads.
    pub(super) fn devices(&self) -> usize {
        self.stages.unwrap_or(1)
    }

    /// How many stages the layers are cut into.
    pub(super) fn count(&self) -> usize {
        self.devices() * self.schedule.stages_per_device()
    }

    pub(super) fn check(&self) -> Result<()> {
        let schedule = self.schedule;
        let per_device = schedule.stages_per_device();
        ensure!(
            per_device > 0,
            wrong_use(format!("--schedule {schedule}: give it at least 1 stage"))
        );
        ensure!(
            schedule.is_executed(),
            wrong_use(format!(
                "--schedule {schedule} splits the backward, which is simulated but not executed yet: \
                 choose gpipe, 1f1b or interleaved"
            ))
        );
        Ok(())
    }
}
