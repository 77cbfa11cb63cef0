//! Simulated steps for the given options, the best first.

use std::cmp::Ordering;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use brimful::Bytes;
use brimful::balance::{LayerCost, Profile};
use brimful::internal::gradient_factor;
use brimful::plan::{Plan, PlanChoice, PlanRow, Request};
use brimful::schedule::{Actions, Costs, Recompute, Schedule, StageCost, simulate};
use brimful_plan::plan::{Misfit, PlannedStep, misfits, plan_watched};
use brimful_plan::schedule::{ScheduleRecipe, StageLocation, Transfers};
use serde::Serialize;

use super::capacity::Capacity;
use super::options::{MeasuredModel, PlainNumbers, PlanOptions};
use super::table::StageLine;
use crate::config;
use crate::exit::{ensure_use, wrong_use};
use crate::files::text_of;
use crate::progress::Progress;

/// Default time of a device's whole backward: twice the default time of a forward.
const BACKWARD: f64 = 2.0;

/// Plans to print, draw and trace.
pub(super) struct Answers {
    /// All plans, the best first.
    pub(super) lines: Vec<PlanLine>,
    /// Best plan of each schedule, with its timeline.
    pub(super) shown: Vec<PlanAnswer>,
    /// Combinations that could not be planned, each with the reason.
    pub(super) refused: Vec<String>,
    /// True if times are in seconds, false if they are in the user's own unit.
    pub(super) in_seconds: bool,
    /// Limits of offloading, if there is a host to offload to.
    pub(super) capacity: Option<Capacity>,
}

/// Plan for the step, with its timeline.
pub(super) struct PlanAnswer {
    pub(super) line: PlanLine,
    pub(super) step: PlannedStep,
}

impl PlanAnswer {
    /// Orders plans: first the plans that fit. Then shorter steps come first, and then steps that hold fewer
    /// activations.
    fn rank(&self, other: &Self) -> Ordering {
        (other.line.fits.cmp(&self.line.fits))
            .then(self.line.makespan.total_cmp(&other.line.makespan))
            .then(self.held().total_cmp(&other.held()))
    }

    /// Returns the peak of activations held on any device. The unit is the activations of one micro-batch on a
    /// whole device.
    pub(super) fn held(&self) -> f64 {
        let devices = self.step.simulation.devices();
        let most = devices.iter().map(|device| device.peak_held).max().unwrap_or(0);
        most as f64 * devices.len() as f64 / self.step.actions.stages() as f64
    }
}

/// Row of the table; its fields are the keys of `--json`.
#[derive(Clone, Serialize)]
pub(super) struct PlanLine {
    /// Name of the schedule, or of the file that it was read from.
    pub(super) schedule: String,
    pub(super) balance: Vec<usize>,
    pub(super) micro_batches: usize,
    /// Strongest activation recomputation of any stage; unknown for a schedule from a file.
    pub(super) recompute: Option<Recompute>,
    /// Stages of a model, with the location of their weights and activations; empty without a model or profile.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) stages: Vec<StageLine>,
    /// Bytes of offloaded stages on the host.
    pub(super) host_bytes: u64,
    pub(super) makespan: f64,
    pub(super) bubble: f64,
    pub(super) peak_bytes: Vec<u64>,
    pub(super) fits: bool,
    /// The reason, if the plan does not fit.
    pub(super) reason: Option<String>,
}

/// Finds the plans for a profile, a schedule file or plain numbers, whichever is given.
pub(super) fn find(options: &PlanOptions) -> Result<Answers> {
    if let Some((profile, tokens_per_sample)) = profile(options)? {
        return from_profile(options, &profile, tokens_per_sample);
    }
    options.numbers.check()?;
    check_limit(options, options.numbers.has_bytes())?;
    let mut shown = match &options.schedule_file {
        Some(path) => vec![from_file(options, path)?],
        None => from_numbers(options)?,
    };
    shown.sort_by(|a, b| a.rank(b));
    let lines = shown.iter().map(|answer| answer.line.clone()).collect();
    Ok(Answers { lines, shown, refused: Vec::new(), in_seconds: false, capacity: None })
}

/// Refuses a memory limit if the options give no bytes to compare with the limit.
fn check_limit(options: &PlanOptions, has_bytes: bool) -> Result<()> {
    match options.memory_limit {
        Some(limit) if !has_bytes => Err(wrong_use(format!(
            "--memory-limit {limit} has nothing to be compared with: give --activations and \
             --parameters, a --model, or a --profile with bytes"
        ))),
        _ => Ok(()),
    }
}

/// Measures or reads the layers' costs, if a model or a profile is given. If the samples are text, also returns
/// the number of tokens per sample.
fn profile(options: &PlanOptions) -> Result<Option<(Profile, Option<u64>)>> {
    let MeasuredModel { model, profile, .. } = &options.measured;
    match (model, profile) {
        (Some(model), _) => options.measured.measure(model).map(Some),
        (None, Some(path)) => Ok(Some((read_profile(path)?, None))),
        (None, None) => Ok(None),
    }
}

fn from_profile(
    options: &PlanOptions,
    profile: &Profile,
    tokens_per_sample: Option<u64>,
) -> Result<Answers> {
    let weighs = |layer: &LayerCost| layer.parameter_bytes + layer.activation_bytes > 0;
    check_limit(options, profile.layers.iter().any(weighs))?;
    let request = request(options, profile)?;
    let mut plan = planned(&request)?;
    // The sort is stable: it keeps the planner's order among plans that fit, and among plans that do not fit.
    plan.rows.sort_by_key(|row| !row.fits);
    let mut best: Vec<&PlanRow> = Vec::new();
    for row in &plan.rows {
        if !best.iter().any(|better| better.choice.schedule == row.choice.schedule) {
            best.push(row);
        }
    }
    let line = |row: &PlanRow| PlanLine::of_row(row, profile);
    let answer =
        |row: &PlanRow| Ok(PlanAnswer { line: line(row), step: PlannedStep::new(&request, row)? });
    Ok(Answers {
        lines: plan.rows.iter().map(line).collect(),
        shown: best.into_iter().map(answer).collect::<Result<_>>()?,
        refused: plan.refused.iter().map(ToString::to_string).collect(),
        in_seconds: true,
        capacity: Capacity::of(
            &request,
            options.measured.kind().elt_size_in_bytes(),
            tokens_per_sample,
        ),
    })
}

/// Simulates every combination, with a progress line.
fn planned(request: &Request<'_>) -> Result<Plan> {
    let progress = Progress::new(request.schedules.len() * request.micro_batches.len(), "plans");
    Ok(plan_watched(request, |PlanChoice { schedule, micro_batches, .. }| {
        progress.doing(format!("{schedule} of {micro_batches} micro-batches"));
        progress.advance(1);
    })?)
}

fn request<'a>(options: &PlanOptions, profile: &'a Profile) -> Result<Request<'a>> {
    let (Some(stages), Some(batch)) = (options.stages, options.measured.batch_size) else {
        bail!("a model needs --stages and --batch-size");
    };
    let layers = profile.layers.len();
    ensure_use!(
        stages <= layers,
        "{stages} stages need as many layers, but the model has {layers}: lower --stages"
    );
    ensure_use!(
        stages == 1 || !options.measured.update_in_backward,
        "--update-in-backward is for one device, but --stages is {stages}: give --stages 1, or leave \
             --update-in-backward out"
    );
    let mut request = Request::new(profile, vec![options.measured_device()?; stages], batch);
    request.schedules = options.schedules();
    request.sums_apart = options.measured.sums_apart()?;
    request.gradient_bytes = gradient_factor(options.measured.kind());
    request.optimizer_bytes = options.measured.optimizer_bytes()?;
    request.update_in_backward = options.measured.update_in_backward;
    request.sent_gradient_bytes = options.measured.sent_gradient_bytes()?;
    if let Some(m) = options.num_micro_batches {
        request.micro_batches = vec![m];
    }
    request.recompute = options.recompute;
    options.measured.host(&mut request)?;
    Ok(request)
}

fn read_profile(path: &Path) -> Result<Profile> {
    let text = text_of(path)?;
    let is_json = path.extension().is_some_and(|extension| extension == "json");
    let profile = if is_json {
        serde_json::from_str(&text).map_err(anyhow::Error::from)
    } else {
        toml::from_str(&text).map_err(|error| anyhow!(config::line_and_reason(&text, &error)))
    };
    profile.with_context(|| format!("{} is not a profile", path.display()))
}

fn from_file(options: &PlanOptions, path: &Path) -> Result<PlanAnswer> {
    let actions = text_of(path)?.parse::<Actions>();
    let actions = actions.with_context(|| format!("{} cannot be run", path.display()))?;
    simulated(options, path.display().to_string(), None, actions)
}

fn from_numbers(options: &PlanOptions) -> Result<Vec<PlanAnswer>> {
    let (Some(stages), Some(micro_batches)) = (options.stages, options.num_micro_batches) else {
        bail!("a plan without --model or --profile needs --stages and --num-micro-batches");
    };
    let recompute = options.recompute.unwrap_or_default();
    let schedules = options.schedules();
    let progress = Progress::new(schedules.len(), "schedules");
    let answer = |schedule: Schedule| {
        progress.doing(schedule.to_string());
        let actions = match schedule.is_automatic() {
            true => recipe(options, schedule, stages)?.actions(micro_batches, recompute)?,
            false => schedule.actions(stages, micro_batches, recompute)?,
        };
        let answer = simulated(options, schedule.to_string(), Some(recompute), actions);
        progress.advance(1);
        answer
    };
    schedules.into_iter().map(answer).collect()
}

/// Makes the recipe of an automatic schedule for equal devices.
fn recipe(options: &PlanOptions, schedule: Schedule, devices: usize) -> Result<ScheduleRecipe> {
    let per_device = schedule.stages_per_device();
    let stage = options.numbers.stage_cost(per_device as f64);
    let costs = Costs::equal(devices.saturating_mul(per_device), stage);
    Ok(ScheduleRecipe::new(schedule, costs, vec![options.device().memory; devices])?)
}

fn simulated(
    options: &PlanOptions,
    schedule: String,
    recompute: Option<Recompute>,
    actions: Actions,
) -> Result<PlanAnswer> {
    let per_device = actions.stages() as f64 / actions.devices() as f64;
    let costs = Costs::equal(actions.stages(), options.numbers.stage_cost(per_device));
    let simulation = simulate(&actions, &costs)?;
    let misfits = misfits(&simulation, &vec![options.device(); actions.devices()]);
    let line = PlanLine {
        schedule,
        balance: vec![1; actions.stages()],
        micro_batches: actions.micro_batches(),
        recompute,
        stages: Vec::new(),
        host_bytes: 0,
        makespan: simulation.makespan(),
        bubble: simulation.bubble(),
        peak_bytes: simulation.devices().iter().map(|device| device.peak_bytes).collect(),
        fits: misfits.is_empty(),
        reason: reason(&misfits),
    };
    let transfers = Transfers::new(&actions, &vec![StageLocation::DEVICE; actions.stages()], 0)?;
    Ok(PlanAnswer { line, step: PlannedStep { actions, costs, transfers, simulation } })
}

impl PlanLine {
    fn of_row(row: &PlanRow, profile: &Profile) -> Self {
        Self {
            stages: StageLine::of_row(row, profile),
            host_bytes: row.host_bytes,
            schedule: row.choice.schedule.to_string(),
            balance: row.balance.sizes().to_vec(),
            micro_batches: row.choice.micro_batches,
            recompute: Some(row.choice.recompute),
            makespan: row.makespan,
            bubble: row.bubble,
            peak_bytes: row.peak_bytes.clone(),
            fits: row.fits,
            reason: reason(&row.misfits),
        }
    }
}

fn reason(misfits: &[Misfit]) -> Option<String> {
    let (first, rest) = misfits.split_first()?;
    Some(if rest.is_empty() {
        first.to_string()
    } else {
        format!("{first}, and {} more", rest.len())
    })
}

impl PlainNumbers {
    /// Returns whether any number of bytes is given.
    fn has_bytes(&self) -> bool {
        self.activations.or(self.parameters).is_some()
    }

    /// Returns the time of a device's whole backward.
    pub(super) fn backward(&self) -> f64 {
        let parts = self.input_gradient.zip(self.weight_gradient);
        let sum = parts.map(|(input, weight)| input + weight);
        self.backward.or(sum).unwrap_or(BACKWARD)
    }

    /// Returns a device's costs as one layer. If only one of dX and dW is given, the other is the rest of the
    /// backward. If neither is given, each is half of the backward.
    fn whole_device(&self) -> LayerCost {
        let backward = self.backward();
        let rest = |half: Option<f64>| f64::max(backward - half.unwrap_or(backward / 2.0), 0.0);
        let input = self.input_gradient.unwrap_or_else(|| rest(self.weight_gradient));
        let weight = self.weight_gradient.unwrap_or_else(|| rest(self.input_gradient));
        LayerCost {
            backward,
            input_gradient: Some(input),
            weight_gradient: Some(weight),
            ..LayerCost::default()
        }
    }

    /// Refuses times of dX and dW whose sum is less than the time of the whole backward.
    fn check(&self) -> Result<()> {
        let device = self.whole_device();
        let (input, weight) = device.split_backward();
        ensure_use!(
            device.split_adds_up(),
            "--backward {} is more than --input-gradient {input} and --weight-gradient {weight} \
                 add up to: leave one of them out",
            device.backward
        );
        Ok(())
    }

    /// Returns the costs of one stage, if `per_device` stages share a device.
    fn stage_cost(&self, per_device: f64) -> StageCost {
        let whole = self.whole_device();
        let (input, weight) = whole.split_backward();
        let [f, i, w] = [self.forward, input, weight].map(|time| time / per_device);
        let share =
            |bytes: Option<Bytes>| (bytes.map_or(0, |bytes| bytes.0) as f64 / per_device) as u64;
        StageCost {
            backward: whole.backward / per_device,
            activation_bytes: share(self.activations),
            parameter_bytes: share(self.parameters),
            ..StageCost::new(f, i, w)
        }
    }
}
