//! The contestants of a row, and their turns.

use std::time::Instant;

use anyhow::{Result, ensure};
use brimful::layers::Model;
use brimful::memory::{Arena, Memory};
use brimful::{Bytes, Loss, MicroBatcher, Size, split};
use brimful_torch::{device as torch_device, transfer};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use super::super::journal::Journal;
use super::super::progress::Progress;
use super::super::times::Times;
use super::super::work::{Samples, Work};
use super::report::SpeedRow;
use crate::setting::{NumberType, clear_gradients};

/// Steps of each contestant before the first one that counts: kernels are chosen in them, and the
/// allocator fills its cache.
const WARM_UP: usize = 2;

/// Who runs a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Contestant {
    /// A loop written by hand, over the same micro-batches.
    Loop,
    /// The library, with the mini-batch in host memory.
    Streaming,
    /// The library, with the mini-batch already on the device.
    Resident,
}

impl Contestant {
    const ALL: [Self; 3] = [Self::Loop, Self::Streaming, Self::Resident];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Loop => "tch loop",
            Self::Streaming => "brimful",
            Self::Resident => "brimful, batch on device",
        }
    }
}

/// Measures a row: its contestants take turns.
pub(super) fn measure(
    work: &Work,
    device: Device,
    repeats: usize,
    progress: &Progress,
    journal: &mut Journal,
) -> Result<()> {
    progress.row(&work.title());
    let mut arena = Ring::new(work, device)?;
    let mut times = Contestant::ALL.map(|_| Times::default());
    let mut peaks = [None; 3];
    let mut losses = [0.0; 3];
    for turn in 0..WARM_UP + repeats {
        for (i, contestant) in Contestant::ALL.into_iter().enumerate() {
            progress.turn(&work.title(), contestant.name(), turn, WARM_UP, repeats);
            let Turn { seconds, loss, peak } = arena.turn(contestant)?;
            (peaks[i], losses[i]) = (peak, loss);
            if turn >= WARM_UP {
                times[i].push(seconds);
            }
        }
    }
    same(&losses, work.dtype)?;
    if device == Device::Cpu {
        peaks = arena.cpu_peaks()?;
    }
    progress.done();
    let speeds = times.each_ref().map(|times| work.batch as f64 / times.median());
    for (i, contestant) in Contestant::ALL.into_iter().enumerate() {
        let ratio = speeds[i] / speeds[0];
        // Only the streaming one copies what another finds in place.
        let of_resident = (contestant == Contestant::Streaming).then(|| speeds[1] / speeds[2]);
        let row =
            SpeedRow::new(work, contestant, &times[i], ratio, of_resident, peaks[i], losses[i]);
        row.enter(journal)?;
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

/// One model, one mini-batch, and all who run it.
struct Ring<'a> {
    work: &'a Work,
    device: Device,
    store: VarStore,
    model: Model,
    micro: MicroBatcher,
    host: Samples,
    /// The same in page-locked memory: a careful loop's loader puts it there.
    pinned: Samples,
}

/// What one turn gave.
struct Turn {
    seconds: f64,
    loss: f64,
    peak: Option<Bytes>,
}

impl<'a> Ring<'a> {
    fn new(work: &'a Work, device: Device) -> Result<Self> {
        let mut store = VarStore::new(device);
        let model = work.build(&mut store)?;
        let micro = MicroBatcher::new(&store, Size::Fixed(work.micro_batch));
        let host = work.samples(work.batch);
        let pinned = match device {
            Device::Cpu => share(&host),
            _ => (transfer::pin(&host.0)?, transfer::pin(&host.1)?),
        };
        Ok(Self { work, device, store, model, micro, host, pinned })
    }

    /// One step, timed from a quiet device to a quiet device.
    fn turn(&mut self, contestant: Contestant) -> Result<Turn> {
        clear_gradients(&self.store)?;
        // Brought before the clock starts and let go after it, so that it is in nobody else's peak.
        let batch = match contestant {
            Contestant::Loop => share(&self.pinned),
            Contestant::Streaming => share(&self.host),
            Contestant::Resident => on_device(&self.host, self.device),
        };
        torch_device::synchronize(self.device)?;
        let memory = (self.device != Device::Cpu).then_some(Memory::Accelerator(self.device));
        if let Some(memory) = &memory {
            memory.reset_peak()?;
        }
        let start = Instant::now();
        let loss = self.step(contestant, &batch)?;
        torch_device::synchronize(self.device)?;
        let seconds = start.elapsed().as_secs_f64();
        let peak = memory.map(|memory| memory.usage().map(|usage| usage.peak)).transpose()?;
        Ok(Turn { seconds, loss, peak })
    }

    fn step(&mut self, contestant: Contestant, batch: &Samples) -> Result<f64> {
        let Self { work, model, micro, .. } = self;
        match contestant {
            Contestant::Loop => self.by_hand(batch),
            _ => Ok(micro.backward(batch, |samples| Loss::mean(work.loss(model, &samples)))?.loss),
        }
    }

    /// What a user of tch writes: slice, copy, forward, weighted loss, backward.
    fn by_hand(&self, (x, y): &Samples) -> Result<f64> {
        let total = Tensor::zeros([], (Kind::Float, self.device));
        for range in split::by_size(self.work.batch, self.work.micro_batch)? {
            let (start, length) = (range.start as i64, range.len() as i64);
            let [x, y] = [x, y].map(|t| send(&t.narrow(0, start, length), self.device));
            let loss = self.work.loss(&self.model, &(x, y));
            let loss = loss * (length as f64 / self.work.batch as f64);
            loss.backward();
            let _ = total.shallow_clone().g_add_(&loss.detach());
        }
        Ok(total.double_value(&[]))
    }

    /// What a step of each contestant allocates on a CPU. Not in the timed turns: counting costs.
    fn cpu_peaks(&mut self) -> Result<[Option<Bytes>; 3]> {
        let mut peaks = [None; 3];
        for (peak, contestant) in peaks.iter_mut().zip(Contestant::ALL) {
            clear_gradients(&self.store)?;
            let arena = Arena::new("bench");
            let inside = arena.enter();
            self.turn(contestant)?;
            drop(inside);
            *peak = Some(Bytes(arena.peak()));
        }
        clear_gradients(&self.store)?;
        Ok(peaks)
    }
}

fn share((x, y): &Samples) -> Samples {
    (x.shallow_clone(), y.shallow_clone())
}

fn on_device((x, y): &Samples, device: Device) -> Samples {
    (x.to_device(device), y.to_device(device))
}

fn send(tensor: &Tensor, device: Device) -> Tensor {
    tensor.to_device_(device, tensor.kind(), true, false)
}
