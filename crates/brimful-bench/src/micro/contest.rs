//! The contestants of a row, and their turns.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use brimful::Bytes;
use brimful::memory::Arena;
use brimful_cli::setting::NumberType;
use brimful_torch::{device as torch_device, transfer};
use tch::Device;

use super::report::SpeedRow;
use super::tuned::{TunedModel, Tuning, in_use};
use crate::journal::Journal;
use crate::times::StepTimes;
use crate::turns::TurnProgress;
use crate::work::{Samples, Workload};

/// Steps of each contestant before the first one that counts: kernels are chosen in them, and the
/// allocator fills its cache.
const WARM_UP: usize = 2;

/// Who runs a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MicroContestant {
    /// A loop written by hand, over the same micro-batches.
    Loop,
    /// The library, with the mini-batch in host memory.
    Streaming,
    /// The library, with the mini-batch already on the device.
    Resident,
    /// The library, with the mini-batch in host memory, as it is to run the model.
    Tuned(Tuning),
}

impl MicroContestant {
    /// The first three are always there; replay is for CUDA, channels are for convolutions.
    fn all(work: &Workload, device: Device) -> Vec<Self> {
        let mut all = vec![Self::Loop, Self::Streaming, Self::Resident];
        for (replay, channels_last) in [(false, true), (true, false), (true, true)] {
            let possible =
                (!replay || device != Device::Cpu) && (!channels_last || work.is_image());
            all.extend(possible.then_some(Self::Tuned(Tuning { replay, channels_last })));
        }
        all
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Loop => "tch loop",
            Self::Streaming => "brimful",
            Self::Resident => "brimful, batch on device",
            Self::Tuned(tuning) => match (tuning.replay, tuning.channels_last) {
                (true, true) => "brimful, replay, channels last",
                (true, false) => "brimful, replay",
                (false, _) => "brimful, channels last",
            },
        }
    }

    pub(super) fn tuning(self) -> Tuning {
        match self {
            Self::Tuned(tuning) => tuning,
            _ => Tuning { replay: false, channels_last: false },
        }
    }
}

/// What a contestant has shown.
#[derive(Debug)]
pub(super) struct ContestantFigures {
    pub(super) contestant: MicroContestant,
    /// Seconds of the steps that do not count.
    pub(super) warm_up: Vec<f64>,
    pub(super) times: StepTimes,
    pub(super) peak: Option<Bytes>,
    pub(super) loss: f64,
}

impl ContestantFigures {
    fn new(contestant: MicroContestant) -> Self {
        Self { contestant, warm_up: Vec::new(), times: StepTimes::default(), peak: None, loss: 0.0 }
    }
}

/// How often each contestant has its turn.
pub(super) fn turns(repeats: usize) -> usize {
    WARM_UP + repeats
}

/// Measures a row: its contestants take turns.
pub(super) fn measure(
    work: &Workload,
    device: Device,
    repeats: usize,
    progress: &TurnProgress,
    journal: &mut Journal,
) -> Result<()> {
    progress.row(&work.title());
    let mut contest = Contest::new(work, device)?;
    let mut all = contest.take_turns(repeats, progress)?;
    compute_the_same(&all, work.dtype)?;
    if device == Device::Cpu {
        for figures in &mut all {
            figures.peak = Some(contest.cpu_peak(figures.contestant)?);
        }
    }
    progress.done();
    enter(work, &all, journal)
}

/// Contestants that compute different things are not worth comparing.
fn compute_the_same(all: &[ContestantFigures], dtype: NumberType) -> Result<()> {
    let losses: Vec<f64> = all.iter().map(|figures| figures.loss).collect();
    let tolerance = if dtype == NumberType::Bf16 { 0.02 } else { 1e-3 };
    let first = losses.first().copied().unwrap_or_default();
    let near = |loss: &f64| (loss - first).abs() <= tolerance * first.abs();
    ensure!(losses.iter().all(near), "the contestants' losses differ: {losses:?}");
    Ok(())
}

/// Enters a row for each contestant, beside those that it is compared with.
fn enter(work: &Workload, all: &[ContestantFigures], journal: &mut Journal) -> Result<()> {
    let by_hand = seconds_of(MicroContestant::Loop, all)?;
    let resident = seconds_of(MicroContestant::Resident, all)?;
    for figures in all {
        let seconds = figures.times.median();
        // Only the streaming one copies what another finds in place.
        let streams = figures.contestant == MicroContestant::Streaming;
        let ratio_to_resident = streams.then_some(resident / seconds);
        journal.enter(&SpeedRow::new(work, figures, by_hand / seconds, ratio_to_resident))?;
    }
    Ok(())
}

/// The median of a contestant that is always there.
fn seconds_of(contestant: MicroContestant, all: &[ContestantFigures]) -> Result<f64> {
    let found = all.iter().find(|figures| figures.contestant == contestant);
    found.map(|figures| figures.times.median()).context("a contestant that all have is missing")
}

/// One mini-batch, and all who run it.
struct Contest<'a> {
    work: &'a Workload,
    device: Device,
    models: Vec<TunedModel>,
    host: Samples,
    /// The same in page-locked memory: a careful loop's loader puts it there.
    pinned: Samples,
}

/// What one turn gave.
struct MeasuredTurn {
    seconds: f64,
    loss: f64,
    peak: Option<Bytes>,
}

impl<'a> Contest<'a> {
    fn new(work: &'a Workload, device: Device) -> Result<Self> {
        let host = work.samples(work.batch);
        let pinned = match device {
            Device::Cpu => share(&host),
            _ => (transfer::pin(&host.0)?, transfer::pin(&host.1)?),
        };
        Ok(Self { work, device, models: Vec::new(), host, pinned })
    }

    /// What every contestant shows in its turns.
    fn take_turns(
        &mut self,
        repeats: usize,
        progress: &TurnProgress,
    ) -> Result<Vec<ContestantFigures>> {
        let title = self.work.title();
        let contestants = MicroContestant::all(self.work, self.device).into_iter();
        let mut all: Vec<_> = contestants.map(ContestantFigures::new).collect();
        for turn in 0..turns(repeats) {
            for figures in &mut all {
                progress.turn(&title, figures.contestant.name(), turn, WARM_UP, repeats);
                let MeasuredTurn { seconds, loss, peak } = self.turn(figures.contestant)?;
                figures.peak = peak;
                figures.loss = loss;
                if turn < WARM_UP {
                    figures.warm_up.push(seconds);
                } else {
                    figures.times.push(seconds);
                }
            }
            progress.advance(1);
        }
        Ok(all)
    }

    /// The model that is run in this way, made where it is not there. All have the same parameters.
    fn tuned(&mut self, tuning: Tuning) -> Result<&mut TunedModel> {
        let found = self.models.iter().position(|model| model.tuning == tuning);
        let index = found.unwrap_or(self.models.len());
        if found.is_none() {
            let mut model = TunedModel::new(self.work, self.device, tuning)?;
            if let Some(first) = self.models.first() {
                model.store.copy(&first.store)?;
            }
            self.models.push(model);
        }
        Ok(&mut self.models[index])
    }

    /// One step, timed from a quiet device to a quiet device.
    fn turn(&mut self, contestant: MicroContestant) -> Result<MeasuredTurn> {
        let device = self.device;
        self.tuned(contestant.tuning())?.clear()?;
        let before = in_use(device)?;
        // Brought before the clock starts and let go after it, so that it is in nobody else's peak.
        let batch = match contestant {
            MicroContestant::Loop => share(&self.pinned),
            MicroContestant::Resident => on_device(&self.host, device),
            _ => share(&self.host),
        };
        let work = self.work;
        let model = self.tuned(contestant.tuning())?;
        torch_device::synchronize(device)?;
        let start = Instant::now();
        let (loss, peak) = match contestant {
            MicroContestant::Loop => model.by_hand(work, &batch)?,
            _ => model.step(&batch)?,
        };
        torch_device::synchronize(device)?;
        let seconds = start.elapsed().as_secs_f64();
        // Nothing of what the others keep is in it.
        let peak = peak.map(|peak| Bytes(peak.0.saturating_sub(before) + model.kept));
        drop(batch);
        model.clear()?;
        model.kept += in_use(device)?.saturating_sub(before);
        Ok(MeasuredTurn { seconds, loss, peak })
    }

    /// What a step of a contestant allocates on a CPU. Not in the timed turns: counting costs.
    fn cpu_peak(&mut self, contestant: MicroContestant) -> Result<Bytes> {
        self.tuned(contestant.tuning())?.clear()?;
        let arena = Arena::new("bench");
        let inside = arena.enter();
        self.turn(contestant)?;
        drop(inside);
        Ok(Bytes(arena.peak()))
    }
}

fn share((x, y): &Samples) -> Samples {
    (x.shallow_clone(), y.shallow_clone())
}

fn on_device((x, y): &Samples, device: Device) -> Samples {
    (x.to_device(device), y.to_device(device))
}
