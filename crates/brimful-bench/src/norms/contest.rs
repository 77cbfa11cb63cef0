//! Contestants for one mini-batch, and their turns.

use anyhow::{Result, ensure};
use brimful::Bytes;
use brimful::memory::Arena;
use brimful_torch::memory_format;
use tch::Device;

use super::exact::ExactModel;
use crate::timed::{self, MeasuredTurn, TurnFigures, share};
use crate::tuned::{TunedModel, Tuning};
use crate::turns::TurnProgress;
use crate::work::{Samples, Workload};

/// Kind of BatchNorm, and how it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NormContestant {
    /// Statistics of each micro-batch: the plain step.
    Deferred,
    /// Deferred BatchNorms with CUDA graphs.
    Replayed,
    /// Statistics of the whole mini-batch.
    Exact,
}

impl NormContestant {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Deferred => "brimful, deferred",
            Self::Replayed => "brimful, deferred, replay",
            Self::Exact => "brimful, exact",
        }
    }
}

/// One mini-batch, and all models that run it.
pub(super) struct NormContest<'a> {
    work: &'a Workload,
    device: Device,
    plain: Vec<(NormContestant, TunedModel)>,
    exact: ExactModel,
    batch: Samples,
}

impl<'a> NormContest<'a> {
    /// Builds all models with the same initial parameters; within a limit only the exact one.
    pub(super) fn new(work: &'a Workload, device: Device, limit: Option<Bytes>) -> Result<Self> {
        let channels_last = device != Device::Cpu;
        let contestants = match (limit, device) {
            (Some(_), _) => vec![],
            (None, Device::Cpu) => vec![(NormContestant::Deferred, false)],
            _ => vec![(NormContestant::Deferred, false), (NormContestant::Replayed, true)],
        };
        let mut plain: Vec<(NormContestant, TunedModel)> = Vec::new();
        for (contestant, cuda_graphs) in contestants {
            let mut model = TunedModel::new(work, device, Tuning { cuda_graphs, channels_last })?;
            if let Some((_, first)) = plain.first() {
                model.store.copy(&first.store)?;
            }
            plain.push((contestant, model));
        }
        let limit = limit.filter(|_| device == Device::Cpu);
        let arena = limit.map(|limit| Arena::limited("cpu", limit.0)).transpose()?;
        let mut exact = ExactModel::new(work, device, arena)?;
        if let Some((_, first)) = plain.first() {
            exact.pipeline.set_variables(first.store.variables().into_iter().collect())?;
        }
        let (x, y) = work.samples(work.batch);
        let x = if channels_last { memory_format::to_memory_format(&x, true)? } else { x };
        Ok(Self { work, device, plain, exact, batch: (x, y) })
    }

    /// Alternates all contestants and returns their figures.
    pub(super) fn take_turns(
        &mut self,
        repeats: usize,
        progress: &TurnProgress,
    ) -> Result<Vec<(NormContestant, TurnFigures)>> {
        let title = self.work.title();
        let plain = self.plain.iter().map(|(contestant, _)| *contestant);
        let all: Vec<_> = plain.chain([NormContestant::Exact]).collect();
        let all = all.into_iter().map(|who| (who, who.name()));
        let mut all = timed::take_turns(&title, all, repeats, progress, |who| self.turn(who))?;
        for (contestant, shown) in &mut all {
            if shown.peak.is_none() {
                shown.peak = Some(self.cpu_peak(*contestant)?);
            }
        }
        self.check(&all)?;
        Ok(all)
    }

    /// Runs one step of a contestant.
    fn turn(&mut self, contestant: NormContestant) -> Result<MeasuredTurn> {
        let Self { device, plain, exact, batch, .. } = self;
        let batch = || share(batch);
        match plain.iter_mut().find(|(who, _)| *who == contestant) {
            Some((_, model)) => timed::turn(model, *device, batch, TunedModel::step),
            None => timed::turn(exact, *device, batch, ExactModel::step),
        }
    }

    /// Returns the peak memory of a contestant's step on a CPU. The timed turns run without memory accounting,
    /// which costs time.
    fn cpu_peak(&mut self, contestant: NormContestant) -> Result<Bytes> {
        if contestant == NormContestant::Exact {
            return ExactModel::cpu_peak(self.work, &self.batch);
        }
        timed::cpu_peak(|| self.turn(contestant))
    }

    /// Checks the losses: if the mini-batch is one micro-batch, exact and deferred BatchNorms compute the same.
    fn check(&self, all: &[(NormContestant, TurnFigures)]) -> Result<()> {
        let is_one = self.work.batch <= self.work.micro_batch;
        let compared = |who: NormContestant| is_one || who != NormContestant::Exact;
        let losses = all.iter().filter(|(who, _)| compared(*who)).map(|(_, shown)| shown.loss);
        timed::compute_the_same(losses, self.work.dtype)?;
        let finite = |(_, shown): &(NormContestant, TurnFigures)| shown.loss.is_finite();
        ensure!(all.iter().all(finite), "a loss is not finite");
        Ok(())
    }
}
