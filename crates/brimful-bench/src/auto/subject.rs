//! Model in limited memory, with a mini-batch in host memory.

use anyhow::{Result, ensure};
use brimful::memory::Memory;
use brimful::micro::MemoryFormat;
use brimful::{Bytes, MicroBatcher, MicroBatches, StepReport};
use brimful_cli::setting::{LossModel, clear_gradients, within};
use tch::Device;
use tch::nn::VarStore;

use crate::timed::timed;
use crate::times::StepTimes;
use crate::work::{Samples, Workload};

/// Work to measure, and its memory limit.
#[derive(Debug)]
pub(super) struct LimitedWork {
    pub(super) work: Workload,
    /// Mini-batch shared by all contestants.
    pub(super) samples: Samples,
    pub(super) device: Device,
    pub(super) limit: Bytes,
    /// True to replay captured micro-batches, in the fastest memory format.
    pub(super) cuda_graphs: bool,
}

/// Model that was built within its memory limit.
pub(super) struct Built<'a> {
    store: VarStore,
    model: LossModel,
    memory: Memory,
    micro: MicroBatcher,
    samples: &'a Samples,
}

impl LimitedWork {
    pub(super) fn title(&self) -> String {
        let Self { work, limit, .. } = self;
        format!("{} {}, {} samples, {limit}", work.model, work.dtype, work.batch)
    }

    /// Builds a new model with this micro-batch size.
    pub(super) fn build(&self, size: MicroBatches) -> Result<Built<'_>> {
        let memory = self.memory()?;
        let _inside = memory.enter();
        tch::manual_seed(0);
        let store = VarStore::new(self.device);
        let model = self.work.build(&store)?;
        let mut micro = MicroBatcher::new(&store, size).memory(memory.clone());
        if self.cuda_graphs {
            micro = micro.cuda_graphs(true).memory_format(MemoryFormat::Measured);
        }
        Ok(Built { store, model, memory, micro, samples: &self.samples })
    }

    /// Returns the device's memory with the requested limit.
    fn memory(&self) -> Result<Memory> {
        let (limit, memory) = (self.limit, Memory::of(self.device)?);
        // A GPU may still have an earlier subject's limit.
        memory.set_limit(None)?;
        let free = memory.usage()?.available.unwrap_or(limit);
        ensure!(free >= limit, "{free} are free, which is less than the limit of {limit}");
        within(memory, Some(limit))
    }
}

impl Built<'_> {
    /// Runs one timed step.
    pub(super) fn step(&mut self) -> Result<(f64, StepReport)> {
        let Self { store, model, micro, samples, .. } = self;
        step(store, model, micro, samples)
    }

    /// Returns the median seconds of some steps.
    pub(super) fn median(&mut self, steps: usize) -> Result<f64> {
        let times = (0..steps).map(|_| Ok(self.step()?.0)).collect::<Result<_>>()?;
        Ok(StepTimes(times).median())
    }

    /// Returns the seconds of a step with a fixed size.
    pub(super) fn step_of(&self, size: usize) -> Result<f64> {
        let Self { store, model, memory, samples, .. } = self;
        let run = || -> Result<f64> {
            let mut micro =
                MicroBatcher::new(store, MicroBatches::Samples(size)).memory(memory.clone());
            Ok(step(store, model, &mut micro, samples)?.0)
        };
        // Other sizes may have left the GPU's cache fragmented.
        Ok(brimful::retry_on_oom(memory, run)?)
    }
}

/// Runs one step, from an idle device to an idle device.
fn step(
    store: &VarStore,
    model: &LossModel,
    micro: &mut MicroBatcher,
    samples: &Samples,
) -> Result<(f64, StepReport)> {
    clear_gradients(store)?;
    let backward = || Ok(micro.backward(samples, |(x, y)| model.loss(&x, &y, true))?);
    let (step, seconds) = timed(store.device(), backward)?;
    ensure!(step.loss.is_finite(), "the loss is {}", step.loss);
    Ok((seconds, step))
}

impl Drop for Built<'_> {
    fn drop(&mut self) {
        // Leaves the same free memory for the next subject.
        let _ = clear_gradients(&self.store);
    }
}
