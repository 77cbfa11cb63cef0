//! Pipeline of one schedule: planned, built, run and timed.

use anyhow::Result;
use brimful::StepReport;
use brimful::balance::Profile;
use brimful::internal::sums_apart;
use brimful::memory::Arena;
use brimful::plan::{PlanChoice, PlanRow, Request, plan};
use brimful::schedule::{Costs, simulate};
use brimful::{Bytes, DeviceSpec, Pipeline};
use brimful_plan::plan::{self};
use brimful_plan::schedule::ScheduleRecipe;
use tch::{Device, Tensor};

use crate::timed::pipeline_step;
use crate::times::StepTimes;
use crate::work::{Samples, Workload};

/// Pipeline and its results.
pub(super) struct Runner {
    pub(super) row: PlanRow,
    /// Step planned from the layers' times.
    pub(super) planned: plan::PlannedStep,
    pub(super) times: StepTimes,
    /// Reports of the measured steps.
    steps: Vec<StepReport>,
    /// Peak of each device, if accounted.
    pub(super) peaks: Vec<Option<Bytes>>,
    pipeline: Pipeline,
    work: Workload,
    stages: usize,
}

impl Runner {
    /// Builds a pipeline balanced by the layers' times, with the model's parameters.
    pub(super) fn new(
        choice: PlanChoice,
        work: &Workload,
        profile: &Profile,
        devices: &[Device],
        parameters: &[(String, Tensor)],
    ) -> Result<Self> {
        let stages = devices.len();
        let mut request =
            Request::new(profile, vec![plan::PlanDevice::default(); stages], work.batch);
        request.schedules = vec![choice.schedule];
        request.micro_batches = vec![choice.micro_batches];
        request.recompute = Some(choice.recompute);
        request.sums_apart = devices.iter().any(|device| sums_apart(*device, work.dtype.kind()));
        let row = plan(&request)?.rows.swap_remove(0);
        let planned = plan::PlannedStep::new(&request, &row)?;
        let devices = devices.iter().map(|device| DeviceSpec::from(*device).threads(1));
        let mut pipeline = Pipeline::builder(work.layers()?).devices(devices).plan(&row).build()?;
        let share = |(name, value): &(String, Tensor)| (name.clone(), value.shallow_clone());
        pipeline.set_variables(parameters.iter().map(share).collect())?;
        let (times, work) = (StepTimes::default(), work.clone());
        let (steps, peaks) = (Vec::new(), Vec::new());
        Ok(Self { row, planned, times, steps, peaks, pipeline, work, stages })
    }

    /// Runs one step, and returns its loss.
    pub(super) fn step(&mut self, batch: &Samples, counts: bool) -> Result<f64> {
        let (step, seconds) = pipeline_step(&mut self.pipeline, batch)?;
        let loss = step.loss;
        if counts {
            self.times.push(seconds);
            self.steps.push(step);
        }
        Ok(loss)
    }

    /// Returns the step of median time.
    pub(super) fn typical(&self) -> Option<&StepReport> {
        let mut steps: Vec<_> = self.steps.iter().collect();
        steps.sort_by_key(|step| step.time);
        steps.get(steps.len() / 2).copied()
    }

    /// Measures the peaks of the devices. On a CPU a separate pipeline runs for this, because accounting costs time.
    pub(super) fn count(&mut self, batch: &Samples) -> Result<()> {
        if self.pipeline.output_device() != Device::Cpu {
            self.peaks = self.typical().map(|step| step.peaks.clone()).unwrap_or_default();
            return Ok(());
        }
        let device = |number| DeviceSpec::from(Arena::new(&format!("stage {number}"))).threads(1);
        let devices = (0..self.stages).map(device);
        let builder = Pipeline::builder(self.work.layers()?).devices(devices).plan(&self.row);
        self.peaks = pipeline_step(&mut builder.build()?, batch)?.0.peaks;
        Ok(())
    }

    /// Returns the speed-up over one thread with equal stages, if a backward takes as long as two forwards. For an
    /// automatic schedule, makes a new list of actions for such stages.
    pub(super) fn limit(&self) -> Result<f64> {
        let PlanChoice { schedule, micro_batches, recompute } = self.row.choice;
        let costs = Costs::ticks(self.planned.actions.stages());
        let work = 3.0 * (costs.stages.len() * micro_batches) as f64;
        let simulation = if schedule.is_automatic() {
            let recipe = ScheduleRecipe::new(schedule, costs.clone(), vec![None; self.stages])?;
            simulate(&recipe.actions(micro_batches, recompute)?, &costs)?
        } else {
            simulate(&self.planned.actions, &costs)?
        };
        Ok(work / simulation.makespan())
    }

    /// Returns the speed-up that the stages' measured times allow.
    pub(super) fn simulated(&self) -> f64 {
        let plan::PlannedStep { actions, costs, simulation, .. } = &self.planned;
        let once: f64 = costs.stages.iter().map(|stage| stage.forward + stage.backward).sum();
        once * actions.micro_batches() as f64 / simulation.makespan()
    }
}
