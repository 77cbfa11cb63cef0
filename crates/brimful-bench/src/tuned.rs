//! Model with one tuning, run by the library or by hand.

use anyhow::{Result, bail};
use brimful::memory::Memory;
use brimful::micro::MemoryFormat;
use brimful::{MicroBatcher, MicroBatches};
use brimful_cli::setting::{LossModel, clear_gradients};
use brimful_plan::split;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use crate::timed::{LossAndPeak, Timed, in_use};
use crate::work::{Samples, Workload};

/// Run configuration of the library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tuning {
    pub(crate) cuda_graphs: bool,
    pub(crate) channels_last: bool,
}

/// Model with one tuning. With CUDA graphs its memory must not move.
pub(crate) struct TunedModel {
    pub(crate) tuning: Tuning,
    pub(crate) store: VarStore,
    model: LossModel,
    micro: MicroBatcher,
    /// Device memory kept between turns.
    kept: u64,
}

impl TunedModel {
    pub(crate) fn new(work: &Workload, device: Device, tuning: Tuning) -> Result<Self> {
        let before = in_use(device)?;
        let store = VarStore::new(device);
        let model = work.build(&store)?;
        let memory_format =
            if tuning.channels_last { MemoryFormat::ChannelsLast } else { MemoryFormat::AsIs };
        let micro = MicroBatcher::new(&store, MicroBatches::Samples(work.micro_batch));
        let micro = micro.cuda_graphs(tuning.cuda_graphs).memory_format(memory_format);
        let kept = in_use(device)?.saturating_sub(before);
        Ok(Self { tuning, store, model, micro, kept })
    }

    pub(crate) fn step(&mut self, batch: &Samples) -> Result<LossAndPeak> {
        let Self { model, micro, .. } = self;
        let step = micro.backward(batch, |(x, y)| model.loss(&x, &y, true))?;
        if let (true, Some(cause)) = (self.tuning.cuda_graphs, micro.eager_cause()) {
            bail!("the model was not replayed: {cause}");
        }
        Ok((step.loss, step.peak()))
    }

    /// Runs a step as a user of tch writes it: slice, copy, forward, weighted loss, backward.
    pub(crate) fn by_hand(&self, work: &Workload, (x, y): &Samples) -> Result<LossAndPeak> {
        let device = self.store.device();
        let memory = (device != Device::Cpu).then_some(Memory::Accelerator(device));
        if let Some(memory) = &memory {
            memory.reset_peak()?;
        }
        let total = Tensor::zeros([], (Kind::Float, device));
        for range in split::by_size(work.batch, work.micro_batch)? {
            let (start, length) = (range.start as i64, range.len() as i64);
            let [x, y] = [x, y].map(|t| send(&t.narrow(0, start, length), device));
            let loss = self.model.plain_loss(&x, &y);
            let loss = loss * (length as f64 / work.batch as f64);
            loss.backward();
            let _ = total.shallow_clone().g_add_(&loss.detach());
        }
        let loss = total.double_value(&[]);
        let peak = memory.map(|memory| memory.usage().map(|usage| usage.peak)).transpose()?;
        Ok((loss, peak))
    }
}

impl Timed for TunedModel {
    fn clear(&mut self) -> Result<()> {
        clear_gradients(&self.store)
    }

    fn kept(&mut self) -> &mut u64 {
        &mut self.kept
    }
}

fn send(tensor: &Tensor, device: Device) -> Tensor {
    tensor.to_device_(device, tensor.kind(), true, false)
}
