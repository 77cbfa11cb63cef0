//! Peak memory and rate by the number of micro-batches: neither should depend on the mini-batch.
//!
//! One micro-batch is special: no gradient is there before its backward, and nothing waits behind
//! it. From two on, gradients are kept through later forwards, and the next micro-batch is brought
//! ahead of its use. So 64 is compared with 1, and 128 with 2.

use std::time::Instant;

use anyhow::{Context, Result};
use brimful::memory::{Arena, Memory};
use brimful::{Bytes, Loss, MicroBatcher, Size};
use tch::Device;
use tch::nn::VarStore;

use super::super::journal::Journal;
use super::super::progress::Progress;
use super::super::work::{Samples, Work};
use super::report::MemoryRow;
use crate::setting::clear_gradients;

/// Micro-batches in each mini-batch, and which of them it is compared with.
const COUNTS: [(usize, Option<usize>); 4] = [(1, None), (2, None), (64, Some(1)), (128, Some(2))];
/// Micro-batches in all of them.
pub(super) const PIECES: usize = 1 + 2 + 64 + 128;

/// Measures the peaks of one micro-batch size, with the mini-batch in host memory.
pub(super) fn measure(
    work: &Work,
    device: Device,
    progress: &Progress,
    journal: &mut Journal,
) -> Result<()> {
    let memory = match device {
        Device::Cpu => Memory::Arena(Arena::new("bench")),
        _ => Memory::Accelerator(device),
    };
    let mut store = VarStore::new(device);
    let inside = memory.enter();
    let model = work.build(&mut store)?;
    drop(inside);
    let one = work.samples(work.micro_batch);
    let mut peaks: Vec<(usize, Bytes)> = Vec::new();
    for (count, base) in COUNTS {
        let work = Work { batch: work.micro_batch * count, ..work.clone() };
        progress.row(&work.title());
        let batch = repeated(&one, count);
        let size = Size::Fixed(work.micro_batch);
        let mut micro = MicroBatcher::new(&store, size).memory(memory.clone());
        let mut step = || {
            clear_gradients(&store)?;
            let step = micro.backward(&batch, |samples| Loss::mean(work.loss(&model, &samples)))?;
            step.peak.context("the step did not count its memory")
        };
        // The first one also chooses kernels, which takes memory of its own.
        step()?;
        let start = Instant::now();
        let peak = step()?;
        let speed = work.batch as f64 / start.elapsed().as_secs_f64();
        clear_gradients(&store)?;
        progress.advance(count);
        progress.done();
        let against = base.and_then(|base| peaks.iter().find(|(count, _)| *count == base));
        let ratio = against.map(|(_, base)| peak.0 as f64 / base.0 as f64);
        MemoryRow::new(&work, count, speed, peak, base, ratio).enter(journal)?;
        peaks.push((count, peak));
    }
    Ok(())
}

/// The same samples again and again: memory does not depend on their values.
fn repeated((x, y): &Samples, count: usize) -> Samples {
    let repeat = |t: &tch::Tensor| {
        let times: Vec<i64> = (0..t.dim()).map(|d| if d == 0 { count as i64 } else { 1 }).collect();
        t.repeat(times)
    };
    (repeat(x), repeat(y))
}
