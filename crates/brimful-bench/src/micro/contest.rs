//! The contestants of a row, and their turns.

use std::time::Instant;

use anyhow::{Result, ensure};
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
    let mut arena = Contest::new(work, device)?;
    let new = |contestant| ContestantFigures {
        contestant,
        warm_up: Vec::new(),
        times: StepTimes::default(),
        peak: None,
        loss: 0.0,
    };
    let mut all: Vec<ContestantFigures> =
        MicroContestant::all(work, device).into_iter().map(new).collect();
    for turn in 0..turns(repeats) {
        for figures in &mut all {
            progress.turn(&work.title(), figures.contestant.name(), turn, WARM_UP, repeats);
            let MeasuredTurn { seconds, loss, peak } = arena.turn(figures.contestant)?;
            (figures.peak, figures.loss) = (peak, loss);
            if turn < WARM_UP {
                figures.warm_up.push(seconds);
            } else {
                figures.times.push(seconds);
            }
        }
        progress.advance(1);
    }
    same(&all.iter().map(|figures| figures.loss).collect::<Vec<_>>(), work.dtype)?;
    if device == Device::Cpu {
        for figures in &mut all {
            figures.peak = Some(arena.cpu_peak(figures.contestant)?);
        }
    }
    progress.done();
    let speed = |figures: &ContestantFigures| work.batch as f64 / figures.times.median();
    for figures in &all {
        let ratio = speed(figures) / speed(&all[0]);
        // Only the streaming one copies what another finds in place.
        let streaming = figures.contestant == MicroContestant::Streaming;
        let of_resident = streaming.then(|| speed(&all[1]) / speed(&all[2]));
        SpeedRow::new(work, figures, ratio, of_resident).enter(journal)?;
    }
    Ok(())
}

/// Contestants that compute different things are not worth comparing.
fn same(losses: &[f64], dtype: NumberType) -> Result<()> {
    let tolerance = if dtype == NumberType::Bf16 { 0.02 } else { 1e-3 };
    let near = |loss: &f64| (loss - losses[0]).abs() <= tolerance * losses[0].abs();
    ensure!(losses.iter().all(near), "the contestants' losses differ: {losses:?}");
    Ok(())
}

/// One mini-batch, and all who run it.
struct Contest<'a> {
    work: &'a Workload,
    device: Device,
    corners: Vec<TunedModel>,
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
        Ok(Self { work, device, corners: Vec::new(), host, pinned })
    }

    /// The model that is run in this way, made where it is not there. All have the same parameters.
    fn corner(&mut self, tuning: Tuning) -> Result<&mut TunedModel> {
        let found = self.corners.iter().position(|corner| corner.tuning == tuning);
        let index = found.unwrap_or(self.corners.len());
        if found.is_none() {
            let mut corner = TunedModel::new(self.work, self.device, tuning)?;
            if let Some(first) = self.corners.first() {
                corner.store.copy(&first.store)?;
            }
            self.corners.push(corner);
        }
        Ok(&mut self.corners[index])
    }

    /// One step, timed from a quiet device to a quiet device.
    fn turn(&mut self, contestant: MicroContestant) -> Result<MeasuredTurn> {
        let device = self.device;
        self.corner(contestant.tuning())?.clear()?;
        let before = in_use(device)?;
        // Brought before the clock starts and let go after it, so that it is in nobody else's peak.
        let batch = match contestant {
            MicroContestant::Loop => share(&self.pinned),
            MicroContestant::Resident => on_device(&self.host, device),
            _ => share(&self.host),
        };
        let work = self.work;
        let corner = self.corner(contestant.tuning())?;
        torch_device::synchronize(device)?;
        let start = Instant::now();
        let (loss, peak) = match contestant {
            MicroContestant::Loop => corner.by_hand(work, &batch)?,
            _ => corner.step(work, &batch)?,
        };
        torch_device::synchronize(device)?;
        let seconds = start.elapsed().as_secs_f64();
        // Nothing of what the others keep is in it.
        let peak = peak.map(|peak| Bytes(peak.0.saturating_sub(before) + corner.kept));
        drop(batch);
        corner.clear()?;
        corner.kept += in_use(device)?.saturating_sub(before);
        Ok(MeasuredTurn { seconds, loss, peak })
    }

    /// What a step of a contestant allocates on a CPU. Not in the timed turns: counting costs.
    fn cpu_peak(&mut self, contestant: MicroContestant) -> Result<Bytes> {
        self.corner(contestant.tuning())?.clear()?;
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
