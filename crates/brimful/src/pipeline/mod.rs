//! Pipeline parallelism: a model spread over devices, with every device busy.
//!
//! The layers are cut into stages. Each device has one long-lived thread, which owns the device's stages and runs
//! the device's list of actions; values, gradients and skips go from stage to stage. A step leaves exactly the
//! gradients that the plain model has on the whole mini-batch.
//!
//! ```
//! use brimful::optim::Sgd;
//! use brimful::schedule::Schedule;
//! use brimful::{DeviceSpec, Layers, Loss, MicroBatches, Pipeline};
//! use tch::{Device, Kind, Tensor, nn};
//!
//! let layers = Layers::new()
//!     .add("hidden", |p| nn::linear(p, 4, 8, Default::default()))
//!     .add_fn("relu", |x| x.relu())
//!     .add("output", |p| nn::linear(p, 8, 3, Default::default()));
//! let mut pipe = Pipeline::builder(layers)
//!     .devices([DeviceSpec::cpu(), DeviceSpec::cpu()])
//!     .balance([2, 1])
//!     .micro_batches(MicroBatches::Count(4))
//!     .schedule(Schedule::OneFOneB)
//!     .build()?;
//! let mut opt = pipe.optimizer(Sgd::new(0.1))?;
//!
//! let x = Tensor::randn([16, 4], (Kind::Float, Device::Cpu));
//! let y = Tensor::randint(3, [16], (Kind::Int64, Device::Cpu));
//! let step = pipe.backward(&x, &y, |out: Tensor, y| Loss::mean(out.cross_entropy_for_logits(y)))?;
//! opt.step()?;
//! opt.zero_grad()?;
//! assert_eq!(step.sizes, [4, 4, 4, 4]);
//! # Ok::<(), brimful::Error>(())
//! ```
//!
//! *Atomic.* A step in which anything fails, in whatever stage, leaves gradients, statistics and
//! random state as they were, and returns an error that names the stage
//! ([`Error::Stage`](crate::Error::Stage)). The next step works.
//!
//! *Random numbers* belong to a step, a layer and a micro-batch ([`StepRng`](crate::StepRng)): they depend neither
//! on the schedule nor on the balance, and a recomputed layer draws the same numbers again.

mod attempt;
mod build;
mod calls;
mod engine;
mod error;
mod offload;
mod parts;
mod ranks;
mod run;
mod site;
mod stage_layout;
mod transfers;
mod variables;
mod worker;

use std::collections::HashMap;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use tch::Device;

pub use build::{BalanceBy, Builder, Offload};
#[doc(hidden)]
pub use build::{OffloadPlan, free_host_bytes, is_offloadable, trained_share};
pub use calls::{ModelOutput, Outputs};
pub use error::PipelineError;
#[doc(hidden)]
pub use offload::measure_host_link;
pub use site::is_recomputing;

use crate::memory_format::FormatChoice;
use crate::step::{MicroBatches, StepState};
use crate::workers::{DeviceSpec, SharedWorkers, Workers};
use crate::{Layers, Result};
use attempt::{OpenForward, PipelineAttempt};
use brimful_plan::schedule::{
    Actions, Location, Recompute, Schedule, ScheduleRecipe, StageId, StageLocation,
};
use build::{check_offloaded_graphs, recompute_at_least};
pub(crate) use parts::{clip_worker_gradients, made_optimizer, settled_ema, settled_optimizer};
pub(crate) use ranks::Ranks;
use stage_layout::StageLayout;
pub(crate) use worker::Worker;

/// A model spread over devices.
///
/// Made by [`Pipeline::builder`]. Dropping it waits until its threads have ended.
#[derive(Debug)]
pub struct Pipeline {
    /// Shared with the optimizers and averages; one holder at a time sends work.
    workers: SharedWorkers<Worker>,
    layout: Arc<StageLayout>,
    ranks: Ranks,
    /// Devices of this process, in the order of its pipelines.
    devices: Vec<DeviceSpec>,
    balance: crate::balance::Balance,
    schedule: Schedule,
    /// Costs that automatic schedules are made from.
    recipe: Option<ScheduleRecipe>,
    recompute: Recompute,
    /// Recomputation of each stage, if a plan sets it.
    recompute_each: Vec<Recompute>,
    /// Whether micro-batches meet at barriers before exact BatchNorms.
    has_barriers: bool,
    /// Device or host for each stage, and the number of device buffers for offloaded stages.
    locations: Vec<StageLocation>,
    device_buffers: usize,
    /// Lists of actions, by number of micro-batches.
    actions: HashMap<usize, Arc<Actions>>,
    /// Forward that waits for its backward.
    open: Option<OpenForward>,
    forwards: u64,
    /// Whether to time the transfers of steps.
    traces_transfers: bool,
    state: StepState<PipelineAttempt>,
    /// Memory format of images and convolutions; none for the user's own.
    format_choice: Option<FormatChoice>,
}

impl Pipeline {
    /// Describes a pipeline of these layers.
    pub fn builder(layers: Layers) -> Builder {
        Builder::new(layers)
    }

    /// Returns the number of layers of each stage.
    pub fn balance(&self) -> &crate::balance::Balance {
        &self.balance
    }

    /// Returns the schedule. With exact BatchNorms, it is breadth-first, whatever was set.
    pub fn schedule(&self) -> Schedule {
        self.schedule
    }

    /// Returns the number of offloaded stages. In a world, counts only this rank's stages.
    ///
    /// # Errors
    /// When a worker has ended.
    pub fn offloaded_stages(&self) -> Result<usize> {
        let of_worker = |worker: &mut worker::Worker| {
            Ok(worker.site.offloaded.as_ref().map_or(0, offload::OffloadedStages::count))
        };
        Ok(self.workers().all(of_worker)?.into_iter().sum())
    }

    /// Returns the devices that have a stage, in the order of the schedule; in a world, those of this rank.
    pub fn devices(&self) -> &[DeviceSpec] {
        &self.devices
    }

    /// Returns the device of the last stage, where outputs and losses are; in ranks without it, the CPU.
    pub fn output_device(&self) -> Device {
        let last = self.layout.last_worker();
        if self.ranks.has(last) { self.device_of(0, last).device } else { Device::Cpu }
    }

    /// Returns the names of the layers, in order.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.layout.layers.names()
    }

    /// Returns how mini-batches are cut into micro-batches.
    pub fn micro_batches(&self) -> MicroBatches {
        self.state.size
    }

    /// Sets how mini-batches are cut into micro-batches from now on.
    pub fn set_micro_batches(&mut self, micro_batches: MicroBatches) {
        self.state.set_size(micro_batches);
    }

    /// Enables or disables timing of the transfers of weights, gradients and boundaries over the host link, and of
    /// compute's waits for them ([`Timeline::host_links`](crate::Timeline::host_links)). Disabled by default. In a
    /// world, all ranks pass the same value.
    pub fn trace_transfers(&mut self, on: bool) {
        self.traces_transfers = on;
    }

    /// Returns the actions of a step of this many micro-batches, as they are executed.
    ///
    /// # Errors
    /// When the schedule would be too large, or a graph of an offloaded stage would outlive its weights.
    pub fn actions(&mut self, micro_batches: usize) -> Result<Arc<Actions>> {
        // Holds the user's own lists (`set_actions`) too, in place of the schedule's.
        if let Some(known) = self.actions.get(&micro_batches) {
            return Ok(Arc::clone(known));
        }
        let recompute = |stage| self.recompute_of(stage, Recompute::ExceptLast);
        let made = match &self.recipe {
            Some(recipe) => recipe.actions_by_stage(micro_batches, recompute)?,
            None => {
                self.schedule.actions_by_stage(self.layout.workers, micro_batches, recompute)?
            }
        };
        check_offloaded_graphs(&made, &self.locations, self.device_buffers)?;
        let made = Arc::new(made);
        self.actions.insert(micro_batches, Arc::clone(&made));
        Ok(made)
    }

    /// Returns the recomputation of a stage. An offloaded stage recomputes at least `least`, because graphs
    /// refer to weights that leave between forward and backward. So does a stage with a barrier in limited
    /// memory, unless the activation cache has enough free bytes at run time.
    fn recompute_of(&self, stage: StageId, least: Recompute) -> Recompute {
        let asked = self.recompute_each.get(stage.index()).copied().unwrap_or(self.recompute);
        let location = self.locations.get(stage.index()).map(|location| location.weights);
        let is_run_again = location == Some(Location::Host) || self.has_limited_barriers();
        recompute_at_least(asked, is_run_again, least)
    }

    fn has_limited_barriers(&self) -> bool {
        let limit = |device: &DeviceSpec| device.memory()?.usage().ok()?.limit;
        self.has_barriers && self.devices.iter().any(|device| limit(device).is_some())
    }

    fn workers(&self) -> MutexGuard<'_, Workers<Worker>> {
        self.workers.lock()
    }

    /// Records a step's time, from which the faster memory format is chosen.
    fn learn_format(&mut self, samples: usize, time: Duration) {
        let Some(choice) = &mut self.format_choice else { return };
        if let Some(factor) = choice.observe(samples, time, false) {
            self.state.sizes.rearranged(factor);
        }
    }

    fn seeded_devices(&self) -> Vec<Device> {
        self.devices.iter().map(|device| device.device).collect()
    }
}
