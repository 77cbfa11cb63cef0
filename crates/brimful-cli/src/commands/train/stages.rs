//! Options of a model that is cut into stages.

use std::path::PathBuf;

use anyhow::Result;
use brimful::schedule::{Recompute, Schedule};
use clap::Args;

use super::offload::OffloadArgument;
use crate::exit::{ensure_unsaid, ensure_use};
use crate::setting::{self, words};

/// How the model is cut over devices.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "A model that does not fit, in stages")]
pub(crate) struct Stages {
    #[arg(long, short = 's', value_name = "S", value_parser = words::count, help = words::STAGES)]
    pub(crate) stages: Option<usize>,
    /// Where weights, gradients and the optimizer's state live: on the host, a model is cut into a stage
    /// a layer, of which two are on the device at a time [default: auto with --stages or --memory-limit, but
    /// with --schedule, --replicas, exact BatchNorms or over ranks none, as without these two]
    #[arg(long, value_enum, value_name = "WHAT")]
    pub(crate) offload: Option<OffloadArgument>,
    /// Let the updates of a model on the host follow its backward, stage by stage, instead of coming after
    /// it: faster, but a step that fails then has changed some weights, and only a saved run goes on
    #[arg(long, conflicts_with_all = ["clip_norm", "accumulate"])]
    pub(crate) update_in_backward: bool,
    #[arg(long, value_name = "NAME", value_parser = setting::schedule)]
    #[arg(help = format!("{} [default: 1f1b; of a model on the host, breadth-first]", words::SCHEDULE))]
    pub(crate) schedule: Option<Schedule>,
    #[arg(long, value_name = "WHEN", value_parser = setting::recompute)]
    #[arg(help = format!("{} [default: never]", words::RECOMPUTE))]
    pub(crate) recompute: Option<Recompute>,
    /// Write a step's actions to this file, which ui.perfetto.dev opens: the last step
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
}

impl Stages {
    /// Refuses impossible combinations, and stage options without stages.
    pub(super) fn check(&self) -> Result<()> {
        let is_cut = self.stages.is_some() || self.offload == Some(OffloadArgument::All);
        if !is_cut {
            let flags = [
                ("schedule", self.schedule.is_some()),
                ("recompute", self.recompute.is_some()),
                ("trace", self.trace.is_some()),
                ("update-in-backward", self.update_in_backward),
            ];
            let purpose = "a model in stages: give --stages <S> or --offload all too";
            ensure_unsaid(&flags, purpose)?;
        }
        let Some(schedule) = self.schedule else { return Ok(()) };
        ensure_use!(
            schedule.stages_per_device() > 0,
            "--schedule {schedule}: give it at least 1 stage"
        );
        let splits_offloaded =
            self.offload == Some(OffloadArgument::All) && schedule.splits_backward();
        ensure_use!(
            !splits_offloaded || schedule.stages_per_device() <= 2,
            "--schedule {schedule} splits backwards, for which 2 stages of a model on the host are \
                 the most: choose breadth-first, or leave --offload all out"
        );
        Ok(())
    }
}
