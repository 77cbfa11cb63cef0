//! Peak memory and rate by the number of micro-batches: neither should depend on the mini-batch.
//!
//! A single micro-batch is special: there is no gradient before its backward, and no next micro-batch to prefetch.
//! From two on, gradients are kept through later forwards, and the next micro-batch is prefetched. So 64
//! micro-batches are compared with 1, and 128 micro-batches and a whole training set with 2.

use std::time::Instant;

use anyhow::{Context, Result};
use brimful::memory::{Arena, Memory};
use brimful::{Bytes, MicroBatcher, MicroBatches};
use brimful_cli::setting::{LossModel, clear_gradients};
use tch::Device;
use tch::nn::VarStore;

use super::report::MemoryRow;
use crate::columns::{Columns, IN_ONE_PIECE};
use crate::journal::Journal;
use crate::turns::TurnProgress;
use crate::work::{Samples, Workload};

/// Micro-batches in each mini-batch, and the mini-batch that each is compared with.
const COUNTS: [(usize, Option<usize>); 8] = [
    (1, None),
    (2, None),
    (4, None),
    (8, None),
    (16, None),
    (32, None),
    (64, Some(1)),
    (128, Some(2)),
];

/// Returns the number of micro-batches in all mini-batches.
pub(super) fn pieces(work: &Workload, training_set: Option<usize>) -> usize {
    let mini_batches = mini_batches(work.micro_batch, training_set);
    mini_batches.map(|(samples, _)| samples.div_ceil(work.micro_batch)).sum()
}

/// Returns the samples of each mini-batch, and the count of micro-batches that it is compared with.
fn mini_batches(
    micro_batch: usize,
    training_set: Option<usize>,
) -> impl Iterator<Item = (usize, Option<usize>)> {
    let counted = COUNTS.into_iter().map(move |(count, base)| (count * micro_batch, base));
    counted.chain(training_set.map(|samples| (samples, Some(2))))
}

/// Measures the peaks of one micro-batch size, with the mini-batch in host memory.
pub(super) fn measure(
    work: &Workload,
    training_set: Option<usize>,
    device: Device,
    progress: &TurnProgress,
    journal: &mut Journal,
) -> Result<()> {
    let counted = CountedModel::new(work, device)?;
    let one = work.samples(work.micro_batch);
    let mut peaks: Vec<(usize, Bytes)> = Vec::new();
    for (samples, base) in mini_batches(work.micro_batch, training_set) {
        let count = samples.div_ceil(work.micro_batch);
        let work = Workload { batch: samples, ..work.clone() };
        progress.row(&work.title());
        let (peak, seconds) = counted.step(&work, &repeated(&one, count, samples))?;
        progress.advance(count);
        progress.done();
        let against = base.and_then(|base| peaks.iter().find(|(count, _)| *count == base));
        journal.enter(&MemoryRow {
            columns: Columns::new("brimful", &work),
            staging: IN_ONE_PIECE,
            micro_batches: count,
            samples_per_s: work.batch as f64 / seconds,
            peak_bytes: peak,
            compared_with: base,
            ratio: against.map(|(_, base)| peak.0 as f64 / base.0 as f64),
        })?;
        peaks.push((count, peak));
    }
    Ok(())
}

/// Model with memory accounting.
struct CountedModel {
    memory: Memory,
    store: VarStore,
    model: LossModel,
}

impl CountedModel {
    fn new(work: &Workload, device: Device) -> Result<Self> {
        let memory = match device {
            Device::Cpu => Memory::Arena(Arena::new("bench")),
            _ => Memory::Accelerator(device),
        };
        let store = VarStore::new(device);
        let inside = memory.enter();
        let model = work.build(&store)?;
        drop(inside);
        Ok(Self { memory, store, model })
    }

    /// Returns the peak and the seconds of the second of two steps over this mini-batch.
    fn step(&self, work: &Workload, batch: &Samples) -> Result<(Bytes, f64)> {
        let size = MicroBatches::Samples(work.micro_batch);
        let mut micro = MicroBatcher::new(&self.store, size).memory(self.memory.clone());
        let mut step = || {
            clear_gradients(&self.store)?;
            let step = micro.backward(batch, |(x, y)| self.model.loss(&x, &y, true))?;
            step.peak().context("the step did not count its memory")
        };
        // The first step also chooses kernels, which takes memory of its own.
        step()?;
        let start = Instant::now();
        let peak = step()?;
        let seconds = start.elapsed().as_secs_f64();
        clear_gradients(&self.store)?;
        Ok((peak, seconds))
    }
}

/// Repeats the samples: memory does not depend on their values.
fn repeated((x, y): &Samples, count: usize, samples: usize) -> Samples {
    let repeat = |t: &tch::Tensor| {
        let times: Vec<i64> = (0..t.dim()).map(|d| if d == 0 { count as i64 } else { 1 }).collect();
        t.repeat(times).narrow(0, 0, samples as i64)
    };
    (repeat(x), repeat(y))
}
