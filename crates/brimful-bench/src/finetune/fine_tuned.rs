//! Model that is fine-tuned: whole on its device, or in offloaded stages.

use anyhow::{Result, bail};
use brimful::memory::Memory;
use brimful::optim::{AdamW, Optimizer};
use brimful::pipeline::{Builder, Offload};
use brimful::schedule::Recompute;
use brimful::{
    Bytes, DeviceSpec, Layers, MicroBatcher, MicroBatches, Pipeline, StepReport, retry_on_oom,
};
use brimful_cli::setting::{self, LossModel};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use crate::offload::OffloadArgument;
use crate::staged::StagedTraining;
use crate::steady::{LEARNING_RATE, SteadyTraining};
use crate::work::Samples;

/// Model and its trainer.
pub(super) trait FineTuned: SteadyTraining {
    fn variables(&self) -> Result<Vec<(String, Tensor)>>;

    /// Returns the peak device memory of the last step, with its update.
    fn peak(&self, step: &StepReport) -> Result<Option<Bytes>>;
}

/// Builds the model, on its device or offloaded.
pub(super) fn fine_tuned(
    layers: Layers,
    device: Device,
    offload: OffloadArgument,
    micro_batch: usize,
) -> Result<Box<dyn FineTuned>> {
    Ok(match offload {
        OffloadArgument::Device => Box::new(WholeTuned::new(&layers, device, micro_batch)?),
        OffloadArgument::Host | OffloadArgument::HostInBackward => {
            let builder = on_host(layers, device, micro_batch);
            let builder = builder.update_in_backward(offload.updates_in_backward());
            Box::new(StagedTraining::new(builder, AdamW::new(LEARNING_RATE), setting::loss)?)
        }
        OffloadArgument::Auto | OffloadArgument::AutoInBackward => {
            bail!("a planned offload is not measured here: give device, host or host-in-backward")
        }
    })
}

/// Whole model on its device, as `brimful train` runs it: micro-batches use CUDA graphs where possible.
struct WholeTuned {
    micro: MicroBatcher,
    model: LossModel,
    store: VarStore,
    optimizer: Optimizer,
    memory: Memory,
}

impl WholeTuned {
    fn new(layers: &Layers, device: Device, micro_batch: usize) -> Result<Self> {
        let memory = Memory::of(device)?;
        let _inside = memory.enter();
        let store = VarStore::new(device);
        let model = LossModel::build(&layers.clone().kind(Kind::BFloat16), &store.root())?;
        let method = AdamW::new(LEARNING_RATE);
        let micro = MicroBatcher::new(&store, MicroBatches::Samples(micro_batch))
            .memory(memory.clone())
            .reserve(method)
            .cuda_graphs(device.is_cuda());
        let optimizer = Optimizer::new(&store, method)?.cuda_graphs(device.is_cuda());
        Ok(Self { micro, model, store, optimizer, memory })
    }
}

impl SteadyTraining for WholeTuned {
    fn backward(&mut self, batch: &Samples) -> Result<StepReport> {
        Ok(self.micro.backward(batch, |(x, y)| self.model.loss(&x, &y, true))?)
    }

    fn update(&mut self) -> Result<()> {
        retry_on_oom(&self.memory, || self.optimizer.step())?;
        Ok(self.optimizer.zero_grad()?)
    }

    fn wait(&mut self) -> Result<()> {
        Ok(brimful_torch::device::synchronize(self.store.device())?)
    }
}

impl FineTuned for WholeTuned {
    fn variables(&self) -> Result<Vec<(String, Tensor)>> {
        Ok(self.store.variables().into_iter().collect())
    }

    fn peak(&self, step: &StepReport) -> Result<Option<Bytes>> {
        // The step's peak includes the memory of CUDA graphs, which the memory's own account does not show.
        Ok(step.peak().max(Some(self.memory.usage()?.peak)))
    }
}

/// Configures a pipeline of the smallest stages, all offloaded. Each is copied to the device before it runs, and
/// its activations are recomputed in the backward.
fn on_host(layers: Layers, device: Device, micro_batch: usize) -> Builder {
    Pipeline::builder(layers)
        .devices([DeviceSpec::from(device)])
        .recompute(Recompute::Always)
        .kind(Kind::BFloat16)
        .offload(Offload::Host)
        .micro_batches(MicroBatches::Samples(micro_batch))
}

impl FineTuned for StagedTraining {
    fn variables(&self) -> Result<Vec<(String, Tensor)>> {
        Ok(self.pipeline.variables()?)
    }

    fn peak(&self, step: &StepReport) -> Result<Option<Bytes>> {
        Ok(step.peak())
    }
}
