//! Rows of pipelines: speed beside the limits of bubble and machine, memory, balance.

use anyhow::{Error, Result};
use brimful::Bytes;
use brimful::plan::PlanChoice;
use brimful::schedule::Schedule;
use brimful_cli::setting::ModelName;
use serde::Serialize;
use serde_json::json;

use super::runner::Runner;
use crate::columns::{Columns, IN_ONE_PIECE, Speed, Staging};
use crate::journal::Journal;
use crate::times::StepTimes;
use crate::work::Workload;

/// Contestant and its result.
#[derive(Debug, Serialize)]
struct PipelineRow<T> {
    #[serde(flatten)]
    columns: Columns,
    micro_batches: usize,
    #[serde(flatten)]
    staging: Staging,
    #[serde(flatten)]
    outcome: T,
}

/// Figures of the model on one thread.
#[derive(Debug, Serialize)]
struct AloneFigures {
    #[serde(flatten)]
    speed: Speed,
    ratio: f64,
    peak_bytes: Option<Bytes>,
}

/// Figures of a pipeline.
#[derive(Debug, Serialize)]
struct PipelineFigures {
    #[serde(flatten)]
    speed: Speed,
    balance: Vec<usize>,
    /// Speed, divided by that of one thread in the same run.
    ratio: f64,
    /// Limit of the ratio set by the bubble, for stages of equal time.
    limit: f64,
    /// Parallel capacity of the machine: seconds of one copy alone over the seconds of one copy per stage, all at
    /// once. 1 means that the copies do not slow each other down.
    machine: f64,
    /// Ratio, divided by the product of `limit` and `machine`.
    of_limit: f64,
    /// Limit of the ratio by the stages' measured times: the limit of the balance.
    simulated: f64,
    /// Ratio, divided by the product of `simulated` and `machine`.
    of_balance: f64,
    /// Ratio published by torchgpipe's authors, on Tesla P40s, over one GPU without a pipeline.
    published_ratio: Option<f64>,
    /// Idle time as a share of all time, in the step of median time.
    bubble: Option<f64>,
    /// Peak of the device with the highest one.
    peak_bytes: Option<Bytes>,
    peaks: Vec<Option<Bytes>>,
}

/// Rows of one number of stages.
pub(super) struct PipelineRows<'a> {
    pub(super) work: &'a Workload,
    pub(super) stages: usize,
    pub(super) journal: &'a mut Journal,
}

impl PipelineRows<'_> {
    /// Enters the model on one thread.
    pub(super) fn alone(&mut self, times: &StepTimes) -> Result<()> {
        let speed = Speed::new(self.work, times);
        let figures = AloneFigures { speed, ratio: 1.0, peak_bytes: None };
        self.enter("one thread", IN_ONE_PIECE, figures)
    }

    /// Enters a pipeline, beside one thread and the machine's capacity.
    pub(super) fn piped(&mut self, runner: &Runner, alone: &StepTimes, machine: f64) -> Result<()> {
        let (work, stages) = (self.work, self.stages);
        let PlanChoice { schedule, recompute, .. } = runner.row.choice;
        let (limit, simulated) = (runner.limit()?, runner.simulated());
        let ratio = alone.median() / runner.times.median();
        let figures = PipelineFigures {
            speed: Speed::new(work, &runner.times),
            balance: runner.row.balance.sizes().to_vec(),
            ratio,
            limit,
            machine,
            of_limit: ratio / (limit * machine),
            simulated,
            of_balance: ratio / (simulated * machine),
            published_ratio: published(work.model, stages, schedule),
            bubble: runner.typical().and_then(|step| Some(step.timeline.as_ref()?.bubble())),
            peak_bytes: runner.peaks.iter().flatten().max().copied(),
            peaks: runner.peaks.clone(),
        };
        self.enter("brimful", Staging::new(stages, schedule, recompute), figures)
    }

    /// Enters a pipeline that cannot be built.
    pub(super) fn not_built(&mut self, choice: PlanChoice, error: &Error) -> Result<()> {
        let PlanChoice { schedule, recompute, .. } = choice;
        let error = json!({ "error": format!("{error:#}") });
        self.enter("brimful", Staging::new(self.stages, schedule, recompute), error)
    }

    fn enter(
        &mut self,
        contestant: &'static str,
        staging: Staging,
        outcome: impl Serialize,
    ) -> Result<()> {
        let micro_batches = self.work.batch / self.work.micro_batch;
        let columns = Columns::new(contestant, self.work);
        self.journal.enter(&PipelineRow { columns, micro_batches, staging, outcome })
    }
}

/// Returns the published ratio of GPipe, which recomputes all but the last micro-batch.
fn published(model: ModelName, stages: usize, schedule: Schedule) -> Option<f64> {
    let ratios = match model {
        ModelName::Resnet101 => [0.74, 1.352, 2.181, 2.808],
        ModelName::UNet { blocks: 5, channels: 64 } => [0.858, 1.246, 2.352, 3.105],
        _ => return None,
    };
    let place = [1, 2, 4, 8].iter().position(|count| *count == stages)?;
    (schedule == Schedule::GPipe).then_some(ratios[place])
}
