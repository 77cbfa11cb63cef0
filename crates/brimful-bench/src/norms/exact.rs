//! Model with exact BatchNorms.

use anyhow::Result;
use brimful::memory::Arena;
use brimful::micro::MemoryFormat;
use brimful::{Bytes, DeviceSpec, Loss, MicroBatches, Pipeline};
use brimful_cli::setting::{NormStatistics, loss};
use tch::{Device, Tensor};

use crate::timed::{LossAndPeak, Timed, in_use};
use crate::work::{Samples, Workload};

/// Pipeline of one device; its stages are cut at the barriers across micro-batches.
pub(super) struct ExactModel {
    pub(super) pipeline: Pipeline,
    /// Device memory kept between turns.
    kept: u64,
}

impl ExactModel {
    /// Builds the model on this device, on a CPU within this arena; on a GPU, convolutions are channels last.
    pub(super) fn new(work: &Workload, device: Device, arena: Option<Arena>) -> Result<Self> {
        let before = in_use(device)?;
        let exact = Workload { norms: NormStatistics::Exact, ..work.clone() };
        let on = arena.map_or_else(|| DeviceSpec::from(device), DeviceSpec::from);
        let builder = Pipeline::builder(exact.layers()?).devices([on]).kind(work.dtype.kind());
        let memory_format =
            if device == Device::Cpu { MemoryFormat::AsIs } else { MemoryFormat::ChannelsLast };
        let builder = builder
            .memory_format(memory_format)
            .micro_batches(MicroBatches::Samples(work.micro_batch));
        let pipeline = builder.build()?;
        let kept = in_use(device)?.saturating_sub(before);
        Ok(Self { pipeline, kept })
    }

    pub(super) fn step(&mut self, (x, y): &Samples) -> Result<LossAndPeak> {
        let step = self.pipeline.backward(x, y, |out: Tensor, y| Loss::mean(loss(&out, y)))?;
        Ok((step.loss, step.peak()))
    }

    /// Returns the peak memory of a step on a CPU, beyond the model itself. Runs a separate model, because accounting
    /// costs time.
    pub(super) fn cpu_peak(work: &Workload, batch: &Samples) -> Result<Bytes> {
        let arena = Arena::new("bench");
        let mut counted = Self::new(work, Device::Cpu, Some(arena.clone()))?;
        let before = arena.current();
        counted.step(batch)?;
        Ok(Bytes(arena.peak().saturating_sub(before)))
    }
}

impl Timed for ExactModel {
    fn clear(&mut self) -> Result<()> {
        Ok(self.pipeline.zero_grad()?)
    }

    fn kept(&mut self) -> &mut u64 {
        &mut self.kept
    }
}
