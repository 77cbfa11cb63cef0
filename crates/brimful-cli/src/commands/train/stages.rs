//! Options of a pipeline: stages, schedule, offloading and recomputation.

use std::path::PathBuf;

use anyhow::Result;
use brimful::internal::is_offloadable;
use brimful::schedule::{Recompute, Schedule};
use clap::{Args, ValueEnum};
use tch::Kind;

use super::offload::OffloadArgument;
use crate::exit::{ensure_unsaid, ensure_use};
use crate::setting::{self, NumberType, shown_as_given, words};

/// Pipeline stages, offloading and recomputation.
#[derive(Debug, Clone, Args)]
pub(crate) struct Stages {
    /// Offload model state to host memory: auto, none or all
    ///
    /// Model state is the weights, gradients and optimizer state. With `auto`, it stays on the device if it fits;
    /// otherwise as many stages as needed are offloaded. If model state takes more than half of the memory, `auto`
    /// measures the layers first. With several ranks or replicas, with --schedule, and with exact BatchNorm, `auto`
    /// offloads all layers or none. With `all`, every layer is offloaded, and at most two at a time are on the device
    #[arg(long, value_enum, value_name = "WHICH", default_value = "auto")]
    #[arg(help_heading = "Memory", hide_possible_values = true)]
    pub(crate) offload: OffloadArgument,
    #[arg(long, value_name = "WHEN", value_parser = setting::recompute, help_heading = "Memory")]
    #[arg(help = format!("{} [default: never]", words::RECOMPUTE))]
    #[arg(long_help = format!("{} [default: never]", words::RECOMPUTE_LONG))]
    pub(crate) recompute: Option<Recompute>,
    /// Update offloaded weights during the backward, layer by layer
    ///
    /// Faster than an update after the backward. If a step fails, some weights are already updated: resume from the last
    /// --save
    #[arg(long, conflicts_with_all = ["clip_norm", "accumulate"])]
    #[arg(help_heading = "Memory", hide_short_help = true)]
    pub(crate) update_in_backward: bool,
    /// Dtype of offloaded gradients: f32, or bf16 for half the memory and transfers
    #[arg(long, value_enum, value_name = "DTYPE", default_value = "f32")]
    #[arg(conflicts_with = "update_in_backward")]
    #[arg(help_heading = "Memory", hide_short_help = true, hide_possible_values = true)]
    pub(crate) offload_gradients: GradientDtype,
    #[arg(long, short = 's', value_name = "S", value_parser = words::count, help = words::STAGES)]
    #[arg(long_help = words::STAGES_LONG, help_heading = "Devices")]
    pub(crate) stages: Option<usize>,
    #[arg(long, value_name = "NAME", value_parser = setting::schedule, help_heading = "Devices")]
    #[arg(help = format!("{} [default: 1f1b]", words::SCHEDULE))]
    #[arg(long_help = format!("{} [default: 1f1b; with --offload all, breadth-first]", words::SCHEDULES))]
    pub(crate) schedule: Option<Schedule>,
    /// Write a timeline for ui.perfetto.dev: of the last step
    #[arg(long, value_name = "FILE", help_heading = "Output", hide_short_help = true)]
    pub(crate) trace: Option<PathBuf>,
}

/// Value of `--offload-gradients`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum GradientDtype {
    F32,
    Bf16,
}

shown_as_given!(GradientDtype);

impl GradientDtype {
    /// Refuses bf16 gradients of a model in another dtype.
    pub(crate) fn check(self, dtype: NumberType) -> Result<()> {
        ensure_use!(
            self == Self::F32 || dtype.kind() == Kind::BFloat16,
            "--offload-gradients bf16 needs a model in bf16, but it is in {dtype}: give --dtype bf16, or leave \
             --offload-gradients out"
        );
        Ok(())
    }
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
        if self.offload == OffloadArgument::None {
            let flags = [
                ("update-in-backward", self.update_in_backward),
                ("offload-gradients", self.offload_gradients == GradientDtype::Bf16),
            ];
            ensure_unsaid(&flags, "offloaded weights: leave --offload none out")?;
        }
        let Some(schedule) = self.schedule else { return Ok(()) };
        ensure_use!(
            schedule.stages_per_device() > 0,
            "--schedule {schedule}: give at least 1 stage per device"
        );
        ensure_use!(
            self.offload != OffloadArgument::All || is_offloadable(schedule),
            "--schedule {schedule} splits the backward, which --offload all supports with at most 2 \
                 stages per device: give --schedule breadth-first-{}, or leave --offload all out",
            schedule.stages_per_device()
        );
        Ok(())
    }
}
