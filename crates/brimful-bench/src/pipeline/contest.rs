//! Contestants for one number of stages, and their turns.

use anyhow::{Error, Result, bail, ensure};
use brimful::balance::Profile;
use brimful::plan::PlanChoice;
use tch::Device;

use super::PipelineOptions;
use super::alone::{OneThread, ThreadCopies};
use super::report::PipelineRows;
use super::runner::Runner;
use crate::journal::Journal;
use crate::times::StepTimes;
use crate::turns::TurnProgress;
use crate::work::{Samples, Workload};

/// Steps of each contestant before the first one that counts.
pub(super) const WARM_UP: usize = 1;

/// Model on one thread, its copies, and the pipelines.
pub(super) struct PipelineContest {
    work: Workload,
    stages: usize,
    batch: Samples,
    alone: OneThread,
    /// Copies of the model, one per stage; none on an accelerator, and for a single stage.
    copies: Option<ThreadCopies>,
    pub(super) runners: Vec<Runner>,
    /// Pipelines that cannot be built, for example because the model has too few layers for the schedule.
    missing: Vec<(PlanChoice, Error)>,
}

impl PipelineContest {
    pub(super) fn new(
        options: &PipelineOptions,
        work: &Workload,
        profile: &Profile,
        devices: &[Device],
    ) -> Result<Self> {
        let (alone, stages) = (OneThread::new(work, devices[0])?, devices.len());
        let is_parallel = devices[0] == Device::Cpu && stages > 1;
        let copies = is_parallel.then(|| ThreadCopies::new(work, stages)).transpose()?;
        let (parameters, mut runners, mut missing) =
            (alone.store.variables().into_iter().collect::<Vec<_>>(), Vec::new(), Vec::new());
        for &schedule in &options.schedule {
            for &recompute in &options.recompute {
                let micro_batches = work.batch / work.micro_batch;
                let choice = PlanChoice { schedule, micro_batches, recompute };
                match Runner::new(choice, work, profile, devices, &parameters) {
                    Ok(runner) => runners.push(runner),
                    Err(error) => missing.push((choice, error)),
                }
            }
        }
        if let (true, Some((choice, error))) = (runners.is_empty(), missing.first()) {
            bail!("{}: {error:#}", choice.schedule);
        }
        let batch = work.samples(work.batch);
        Ok(Self { work: work.clone(), stages, batch, alone, copies, runners, missing })
    }

    /// Measures, and enters a row for each contestant.
    pub(super) fn run(
        &mut self,
        repeats: usize,
        progress: &TurnProgress,
        journal: &mut Journal,
    ) -> Result<()> {
        let title = format!("{}, {} stages", self.work.title(), self.stages);
        progress.row(&title);
        let (mut alone, mut copies) = (StepTimes::default(), StepTimes::default());
        for turn in 0..WARM_UP + repeats {
            let counts = turn >= WARM_UP;
            progress.turn(&title, "one thread", turn, WARM_UP, repeats);
            let (seconds, expected) = self.alone.step(&self.batch)?;
            alone.push_if(counts, seconds);
            if let Some(all) = &mut self.copies {
                progress.turn(&title, "copies", turn, WARM_UP, repeats);
                copies.push_if(counts, all.step(&self.batch)?);
            }
            for runner in &mut self.runners {
                progress.turn(&title, &runner.row.choice.to_string(), turn, WARM_UP, repeats);
                let loss = runner.step(&self.batch, counts)?;
                // Contestants that compute different things are not worth comparing.
                let near = (loss - expected).abs() <= 1e-3 * expected.abs();
                ensure!(near, "{}: the loss is {loss}, not {expected}", runner.row.choice);
            }
            progress.advance(1);
        }
        for runner in &mut self.runners {
            runner.count(&self.batch)?;
        }
        progress.done();
        let machine = self.copies.as_ref().map_or(1.0, |_| alone.median() / copies.median());
        let mut rows = PipelineRows { work: &self.work, stages: self.stages, journal };
        rows.alone(&alone)?;
        self.runners.iter().try_for_each(|runner| rows.piped(runner, &alone, machine))?;
        self.missing.iter().try_for_each(|(choice, error)| rows.not_built(*choice, error))
    }
}
