//! The options of a model that is cut into stages, and which of them go together.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use brimful::Bytes;
use brimful::schedule::{Recompute, Schedule};
use clap::Args;

use super::Options;

/// How the model is cut over devices.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "A model that does not fit, in stages")]
pub(crate) struct Stages {
    /// Cut the layers into so many stages, balanced by their time, each on a thread of its own
    #[arg(long, value_name = "S")]
    pub(crate) stages: Option<usize>,
    /// gpipe, 1f1b or interleaved-V with V stages on each device
    #[arg(long, default_value_t = Schedule::OneFOneB, requires = "stages")]
    pub(crate) schedule: Schedule,
    /// Which activations are computed again to save memory: never, except-last or always
    #[arg(long, default_value_t = Recompute::Never, requires = "stages")]
    pub(crate) recompute: Recompute,
    /// Let each device have at most so much memory (CPU alone)
    #[arg(long, value_name = "BYTES", requires = "stages")]
    pub(crate) stage_memory: Option<Bytes>,
    /// Write the last step's actions to this file, which Perfetto opens
    #[arg(long, value_name = "FILE", requires = "stages")]
    pub(crate) trace: Option<PathBuf>,
}

impl Stages {
    /// How many devices, each with as many stages as the schedule puts there.
    pub(super) fn devices(&self) -> usize {
        self.stages.unwrap_or(1) / self.schedule.stages_per_device().max(1)
    }

    pub(super) fn check(&self, options: &Options) -> Result<()> {
        let Some(stages) = self.stages else {
            return Ok(());
        };
        let per_device = self.schedule.stages_per_device();
        ensure!(stages > 0, "--stages 0: give it at least 1");
        ensure!(
            per_device > 0 && stages.is_multiple_of(per_device),
            "--stages {stages}: {} puts {per_device} stages on each device, so give it a multiple of \
             {per_device}",
            self.schedule
        );
        ensure!(
            options.memory_limit.is_none(),
            "--memory-limit is for one device: with --stages, say --stage-memory"
        );
        Ok(())
    }
}
