//! Timed step of one contestant among others in the same process: its seconds, and its own memory.

use std::time::Instant;

use anyhow::{Result, ensure};
use brimful::memory::{Arena, Memory};
use brimful::{Bytes, Loss, Pipeline, StepReport};
use brimful_cli::setting::{NumberType, loss};
use brimful_torch::device as torch_device;
use tch::{Device, Tensor};

use crate::times::StepTimes;
use crate::turns::TurnProgress;
use crate::work::Samples;

/// Steps of each contestant before the first one that counts: kernels are chosen in them, and the allocator fills
/// its cache.
pub(crate) const WARM_UP: usize = 2;

/// Returns the number of each contestant's turns.
pub(crate) fn turns(repeats: usize) -> usize {
    WARM_UP + repeats
}

/// Contestant whose steps are timed.
pub(crate) trait Timed {
    /// Clears its gradients.
    fn clear(&mut self) -> Result<()>;

    /// Returns the device memory that it keeps between turns.
    fn kept(&mut self) -> &mut u64;
}

/// Result of one turn.
pub(crate) struct MeasuredTurn {
    pub(crate) seconds: f64,
    pub(crate) loss: f64,
    pub(crate) peak: Option<Bytes>,
}

/// Loss of a step, and its peak if memory is accounted.
pub(crate) type LossAndPeak = (f64, Option<Bytes>);

/// Figures of a contestant's turns.
#[derive(Debug, Default)]
pub(crate) struct TurnFigures {
    /// Seconds of the steps that do not count.
    pub(crate) warm_up: Vec<f64>,
    pub(crate) times: StepTimes,
    pub(crate) peak: Option<Bytes>,
    pub(crate) loss: f64,
}

/// Alternates named contestants, one step per turn, and returns their figures.
pub(crate) fn take_turns<C: Copy>(
    title: &str,
    contestants: impl IntoIterator<Item = (C, &'static str)>,
    repeats: usize,
    progress: &TurnProgress,
    mut step: impl FnMut(C) -> Result<MeasuredTurn>,
) -> Result<Vec<(C, TurnFigures)>> {
    let contestants = contestants.into_iter();
    let mut all: Vec<_> =
        contestants.map(|(who, name)| (who, name, TurnFigures::default())).collect();
    for turn in 0..turns(repeats) {
        for (who, name, shown) in &mut all {
            progress.turn(title, name, turn, WARM_UP, repeats);
            let MeasuredTurn { seconds, loss, peak } = step(*who)?;
            (shown.peak, shown.loss) = (peak, loss);
            let times = if turn < WARM_UP { &mut shown.warm_up } else { &mut shown.times.0 };
            times.push(seconds);
        }
        progress.advance(1);
    }
    Ok(all.into_iter().map(|(who, _, shown)| (who, shown)).collect())
}

/// Runs a step on a CPU and returns its peak memory. The timed turns run without memory accounting, which costs
/// time.
pub(crate) fn cpu_peak(step: impl FnOnce() -> Result<MeasuredTurn>) -> Result<Bytes> {
    let arena = Arena::new("bench");
    let inside = arena.enter();
    step()?;
    drop(inside);
    Ok(Bytes(arena.peak()))
}

/// Clears the gradients and runs one step of a pipeline; returns its report and its seconds.
pub(crate) fn pipeline_step(
    pipeline: &mut Pipeline,
    (x, y): &Samples,
) -> Result<(StepReport, f64)> {
    pipeline.zero_grad()?;
    let start = Instant::now();
    let step = pipeline.backward(x, y, |out: Tensor, y| Loss::mean(loss(&out, y)))?;
    Ok((step, start.elapsed().as_secs_f64()))
}

/// Runs one step of a model and measures its own memory.
pub(crate) fn turn<M: Timed>(
    model: &mut M,
    device: Device,
    batch: impl FnOnce() -> Samples,
    step: impl FnOnce(&mut M, &Samples) -> Result<LossAndPeak>,
) -> Result<MeasuredTurn> {
    model.clear()?;
    let before = in_use(device)?;
    // The batch is created before the clock starts and freed after it stops, so that no other contestant's peak
    // includes it.
    let batch = batch();
    let ((loss, peak), seconds) = timed(device, || step(model, &batch))?;
    // Excludes memory that other contestants keep.
    let peak = peak.map(|peak| Bytes(peak.0.saturating_sub(before) + *model.kept()));
    drop(batch);
    model.clear()?;
    *model.kept() += in_use(device)?.saturating_sub(before);
    Ok(MeasuredTurn { seconds, loss, peak })
}

/// Runs work from an idle device to an idle device; returns its result and seconds.
pub(crate) fn timed<T>(device: Device, work: impl FnOnce() -> Result<T>) -> Result<(T, f64)> {
    torch_device::synchronize(device)?;
    let start = Instant::now();
    let given = work()?;
    torch_device::synchronize(device)?;
    Ok((given, start.elapsed().as_secs_f64()))
}

/// Lets cuDNN benchmark its kernels, as the peers' scripts do: all micro-batches have one shape, so the benchmark
/// pays off. Returns whether the device is a GPU.
pub(crate) fn try_kernels(device: Device) -> bool {
    let cuda = device != Device::Cpu;
    if cuda {
        tch::Cuda::cudnn_set_benchmark(true);
    }
    cuda
}

/// Checks that losses agree: contestants that compute different things are not worth comparing.
pub(crate) fn compute_the_same(
    losses: impl IntoIterator<Item = f64>,
    dtype: NumberType,
) -> Result<()> {
    let losses: Vec<f64> = losses.into_iter().collect();
    let tolerance = if dtype == NumberType::Bf16 { 0.02 } else { 1e-3 };
    let first = losses.first().copied().unwrap_or_default();
    let near = |loss: &f64| (loss - first).abs() <= tolerance * first.abs();
    ensure!(losses.iter().all(near), "the contestants' losses differ: {losses:?}");
    Ok(())
}

/// Returns the device memory in use now; a CPU's is not counted.
pub(crate) fn in_use(device: Device) -> Result<u64> {
    Ok(match device {
        Device::Cpu => 0,
        _ => Memory::Accelerator(device).usage()?.current.0,
    })
}

/// Returns shallow clones of the tensors.
pub(crate) fn share((x, y): &Samples) -> Samples {
    (x.shallow_clone(), y.shallow_clone())
}
