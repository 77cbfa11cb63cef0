//! Options of a pipeline: stages, schedule, offloading and recomputation.

use std::path::PathBuf;

use anyhow::Result;
use brimful::schedule::{Recompute, Schedule};
use clap::Args;

use super::offload::{OffloadArgument, is_offloadable};
use crate::exit::{ensure_unsaid, ensure_use};
use crate::setting::{self, words};

/// Pipeline stages, offloading and recomputation.
#[derive(Debug, Clone, Args)]
pub(crate) struct Stages {
    /// Offload model state to host memory: auto, none or all
    ///
    /// Model state is the weights, gradients and optimizer state. auto keeps all of it on the device if it fits, and
    /// otherwise offloads as much as needed. It measures the layers only if model state takes more than half of the
    /// memory; over ranks or replicas, with --schedule or with exact BatchNorms it offloads all or nothing. all offloads
    /// every layer: two at a time are on the device
    #[arg(long, value_enum, value_name = "WHICH", default_value = "auto")]
    #[arg(help_heading = "Memory", hide_possible_values = true)]
    pub(crate) offload: OffloadArgument,
    #[arg(long, value_name = "WHEN", value_parser = setting::recompute, help_heading = "Memory")]
    #[arg(help = format!("{} [default: never]", words::RECOMPUTE))]
    pub(crate) recompute: Option<Recompute>,
    /// Update offloaded weights during the backward, layer by layer
    ///
    /// Faster than an update after the backward. But a step that fails has updated some of the weights, and only a saved
    /// run can continue
    #[arg(long, conflicts_with_all = ["clip_norm", "accumulate"])]
    #[arg(help_heading = "Memory", hide_short_help = true)]
    pub(crate) update_in_backward: bool,
    #[arg(long, short = 's', value_name = "S", value_parser = words::count, help = words::STAGES)]
    #[arg(help_heading = "Devices")]
    pub(crate) stages: Option<usize>,
    #[arg(long, value_name = "NAME", value_parser = setting::schedule, help_heading = "Devices")]
    #[arg(help = format!("{} [default: 1f1b]", words::SCHEDULE))]
    #[arg(long_help = format!("{} [default: 1f1b; with --offload all, breadth-first]", words::SCHEDULES))]
    pub(crate) schedule: Option<Schedule>,
    /// Write a trace for ui.perfetto.dev: the last step
    #[arg(long, value_name = "FILE", help_heading = "Output", hide_short_help = true)]
    pub(crate) trace: Option<PathBuf>,
}

impl Stages {
    /// Refuses impossible combinations, and stage options without stages.
    pub(super) fn check(&self) -> Result<()> {
        let is_cut = self.stages.is_some() || self.offload == OffloadArgument::All;
        if !is_cut {
            let flags = [
                ("schedule", self.schedule.is_some()),
                ("recompute", self.recompute.is_some()),
                ("trace", self.trace.is_some()),
                ("update-in-backward", self.update_in_backward),
            ];
            let purpose = "a pipeline: give --stages or --offload all too";
            ensure_unsaid(&flags, purpose)?;
        }
        let Some(schedule) = self.schedule else { return Ok(()) };
        ensure_use!(
            schedule.stages_per_device() > 0,
            "--schedule {schedule}: give at least 1 stage a device"
        );
        ensure_use!(
            self.offload != OffloadArgument::All || is_offloadable(schedule),
            "--schedule {schedule} splits the backward, which --offload all supports with at most 2 \
                 stages a device: give --schedule breadth-first-{}, or leave --offload all out",
            schedule.stages_per_device()
        );
        Ok(())
    }
}
