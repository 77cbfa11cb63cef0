//! Contestants of a row, and their turns.

use anyhow::Result;
use brimful_torch::transfer;
use tch::Device;

use super::report;
use crate::journal::Journal;
use crate::timed::{self, MeasuredTurn, share};
use crate::tuned::{TunedModel, Tuning};
use crate::turns::TurnProgress;
use crate::work::{Samples, Workload};

/// Implementation of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MicroContestant {
    /// Hand-written loop over the same micro-batches.
    Loop,
    /// The library, with the mini-batch in host memory.
    Streaming,
    /// The library, with the mini-batch already on the device.
    Resident,
    /// The library with this tuning, and the mini-batch in host memory.
    Tuned(Tuning),
}

impl MicroContestant {
    /// Returns the contestants. The first three are always included; CUDA graphs need CUDA, channels last needs
    /// convolutions.
    fn all(work: &Workload, device: Device) -> Vec<Self> {
        let mut all = vec![Self::Loop, Self::Streaming, Self::Resident];
        for (cuda_graphs, channels_last) in [(false, true), (true, false), (true, true)] {
            let possible =
                (!cuda_graphs || device != Device::Cpu) && (!channels_last || work.is_image());
            all.extend(possible.then_some(Self::Tuned(Tuning { cuda_graphs, channels_last })));
        }
        all
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Loop => "tch loop",
            Self::Streaming => "brimful",
            Self::Resident => "brimful, batch on device",
            Self::Tuned(tuning) => match (tuning.cuda_graphs, tuning.channels_last) {
                (true, true) => "brimful, replay, channels last",
                (true, false) => "brimful, replay",
                (false, _) => "brimful, channels last",
            },
        }
    }

    pub(super) fn tuning(self) -> Tuning {
        match self {
            Self::Tuned(tuning) => tuning,
            _ => Tuning { cuda_graphs: false, channels_last: false },
        }
    }
}

/// Measures a row: its contestants alternate.
pub(super) fn measure(
    work: &Workload,
    device: Device,
    repeats: usize,
    progress: &TurnProgress,
    journal: &mut Journal,
) -> Result<()> {
    progress.row(&work.title());
    let mut contest = Contest::new(work, device)?;
    let all = MicroContestant::all(work, device).into_iter().map(|who| (who, who.name()));
    let mut all =
        timed::take_turns(&work.title(), all, repeats, progress, |who| contest.turn(who))?;
    timed::compute_the_same(all.iter().map(|(_, shown)| shown.loss), work.dtype)?;
    if device == Device::Cpu {
        for (contestant, shown) in &mut all {
            shown.peak = Some(timed::cpu_peak(|| contest.turn(*contestant))?);
        }
    }
    progress.done();
    report::enter(work, &all, journal)
}

/// One mini-batch, and the models that run it.
struct Contest<'a> {
    work: &'a Workload,
    device: Device,
    models: Vec<TunedModel>,
    /// Mini-batch in host memory; pinned if the device is a GPU, as a careful loop's loader does.
    host: Samples,
}

impl<'a> Contest<'a> {
    fn new(work: &'a Workload, device: Device) -> Result<Self> {
        let (x, y) = work.samples(work.batch);
        let host = match device {
            Device::Cpu => (x, y),
            _ => (transfer::pin(&x)?, transfer::pin(&y)?),
        };
        Ok(Self { work, device, models: Vec::new(), host })
    }

    /// Returns the index of the model with this tuning, creating it if needed. All models have the same
    /// parameters.
    fn tuned(&mut self, tuning: Tuning) -> Result<usize> {
        let found = self.models.iter().position(|model| model.tuning == tuning);
        let index = found.unwrap_or(self.models.len());
        if found.is_none() {
            let mut model = TunedModel::new(self.work, self.device, tuning)?;
            if let Some(first) = self.models.first() {
                model.store.copy(&first.store)?;
            }
            self.models.push(model);
        }
        Ok(index)
    }

    /// Runs one step of a contestant.
    fn turn(&mut self, contestant: MicroContestant) -> Result<MeasuredTurn> {
        let at = self.tuned(contestant.tuning())?;
        let Self { work, device, models, host } = self;
        let batch = || match contestant {
            MicroContestant::Resident => on_device(host, *device),
            _ => share(host),
        };
        timed::turn(&mut models[at], *device, batch, |model, batch| match contestant {
            MicroContestant::Loop => model.by_hand(work, batch),
            _ => model.step(batch),
        })
    }
}

fn on_device((x, y): &Samples, device: Device) -> Samples {
    (x.to_device(device), y.to_device(device))
}
