//! A model that is fine-tuned: whole on its device, or in stages that live on the host.

use anyhow::{Result, bail};
use brimful::memory::Memory;
use brimful::optim::{AdamW, Optimizer};
use brimful::pipeline::{Homes, PipelineOptimizer};
use brimful::schedule::{Recompute, Schedule};
use brimful::{Bytes, DeviceSpec, Layers, Loss, MicroBatcher, Pipeline, Size, balance, guard};
use brimful_cli::setting::{self, LossModel};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use crate::offload::HomeArgument;

const LEARNING_RATE: f64 = 1e-4;

/// The model, and who trains it.
pub(super) enum FineTuned {
    Whole(Box<WholeTuned>),
    AtHome(Box<HomeTuned>),
}

/// All on its device, as `brimful train` has it there: micro-batches are replayed where they can be.
pub(super) struct WholeTuned {
    micro: MicroBatcher,
    model: LossModel,
    store: VarStore,
    optimizer: Optimizer,
    memory: Memory,
    replayed: usize,
    peak: Option<Bytes>,
}

/// In stages as fine as can be, which come to the device in turn and are computed again in the backward.
pub(super) struct HomeTuned {
    pipeline: Pipeline,
    optimizer: PipelineOptimizer,
    peak: Option<Bytes>,
}

impl FineTuned {
    pub(super) fn new(
        layers: Layers,
        device: Device,
        home: HomeArgument,
        micro_batch: usize,
    ) -> Result<Self> {
        Ok(match home {
            HomeArgument::Device => {
                Self::Whole(Box::new(WholeTuned::new(&layers, device, micro_batch)?))
            }
            HomeArgument::Host | HomeArgument::HostFollowing => {
                let mut tuned = HomeTuned::new(layers, device, micro_batch)?;
                tuned.optimizer.follow_backward(home.follows())?;
                Self::AtHome(Box::new(tuned))
            }
            HomeArgument::Auto | HomeArgument::AutoFollowing => {
                bail!(
                    "--homes {} is not measured here: give device, host or host-following",
                    home.contestant()
                )
            }
        })
    }

    pub(super) fn variables(&self) -> Result<Vec<(String, Tensor)>> {
        match self {
            Self::Whole(whole) => Ok(whole.store.variables().into_iter().collect()),
            Self::AtHome(home) => Ok(home.pipeline.variables()?),
        }
    }

    /// Forward and backward over a mini-batch; gives its loss.
    pub(super) fn backward(&mut self, batch: &(Tensor, Tensor)) -> Result<f64> {
        match self {
            Self::Whole(whole) => whole.backward(batch),
            Self::AtHome(home) => home.backward(batch),
        }
    }

    /// The update, and the most memory of the device that its step took.
    pub(super) fn update(&mut self) -> Result<Option<Bytes>> {
        match self {
            Self::Whole(whole) => whole.update(),
            Self::AtHome(home) => home.update(),
        }
    }

    /// Returns when the last update is done.
    pub(super) fn wait(&mut self) -> Result<()> {
        match self {
            Self::Whole(whole) => Ok(brimful_torch::device::synchronize(whole.store.device())?),
            Self::AtHome(home) => Ok(home.optimizer.wait()?),
        }
    }

    /// How many micro-batches of the last step were replayed.
    pub(super) fn replayed(&self) -> usize {
        match self {
            Self::Whole(whole) => whole.replayed,
            Self::AtHome(_) => 0,
        }
    }
}

impl WholeTuned {
    fn new(layers: &Layers, device: Device, micro_batch: usize) -> Result<Self> {
        let memory = Memory::of(device)?;
        let _inside = memory.enter();
        let mut store = VarStore::new(device);
        let model = LossModel::build(layers, &store.root())?;
        store.set_kind(Kind::BFloat16);
        let method = AdamW::new(LEARNING_RATE);
        let micro = MicroBatcher::new(&store, Size::Fixed(micro_batch))
            .memory(memory.clone())
            .reserve(method)
            .replay(device.is_cuda());
        let optimizer = Optimizer::new(&store, method)?.replay(device.is_cuda());
        Ok(Self { micro, model, store, optimizer, memory, replayed: 0, peak: None })
    }

    fn backward(&mut self, batch: &(Tensor, Tensor)) -> Result<f64> {
        let step = self.micro.backward(batch, |(x, y)| self.model.loss(&x, &y, true))?;
        self.replayed = step.replayed;
        // With what replays keep, which the memory's own account does not show.
        self.peak = step.peaks.first().copied().flatten();
        Ok(step.loss)
    }

    fn update(&mut self) -> Result<Option<Bytes>> {
        guard(&self.memory, || self.optimizer.step())?;
        self.optimizer.zero_grad()?;
        Ok(self.peak.max(Some(self.memory.usage()?.peak)))
    }
}

impl HomeTuned {
    fn new(layers: Layers, device: Device, micro_batch: usize) -> Result<Self> {
        let balance = balance::finest(&setting::parameters_used(&layers)?, layers.len())?;
        let stages_per_device = balance.sizes().len();
        let mut pipeline = Pipeline::builder(layers)
            .devices([DeviceSpec::from(device)])
            .balance(balance)
            .schedule(Schedule::BreadthFirst { stages_per_device })
            .recompute(Recompute::Always)
            .kind(Kind::BFloat16)
            .homes(Homes::Host)
            .micro_batches(Size::Fixed(micro_batch))
            .build()?;
        let optimizer = pipeline.optimizer(AdamW::new(LEARNING_RATE))?;
        Ok(Self { pipeline, optimizer, peak: None })
    }

    fn backward(&mut self, (x, y): &(Tensor, Tensor)) -> Result<f64> {
        let step = self
            .pipeline
            .backward(x, y, |logits: Tensor, y| Loss::mean(setting::loss(&logits, y)))?;
        self.peak = step.peaks.first().copied().flatten();
        Ok(step.loss)
    }

    fn update(&mut self) -> Result<Option<Bytes>> {
        self.optimizer.step()?;
        self.optimizer.zero_grad()?;
        Ok(self.peak)
    }
}
