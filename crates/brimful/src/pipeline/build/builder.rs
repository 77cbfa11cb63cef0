//! Describes a pipeline.

use std::path::{Path, PathBuf};

use tch::Kind;

use super::balance::BalanceBy;
use super::offload::{BoundaryLocations, Offload, Sample};
use crate::balance::BalanceError;
use crate::memory::Arena;
use crate::memory_format::MemoryFormat;
use crate::pipeline::error::PipelineError;
use crate::pipeline::offload::{DEVICE_BUFFERS, OffloadSettings};
use crate::step::{MicroBatches, NonFinitePolicy};
use crate::update::Method;
use crate::workers::DeviceSpec;
use crate::{Layers, Result, World};
use brimful_plan::plan::{PlanChoice, PlanRow};
use brimful_plan::schedule::{Location, Recompute, Schedule, ScheduleRecipe};

/// Builder of a pipeline.
#[derive(Debug)]
#[must_use]
pub struct Builder {
    pub(super) layers: Layers,
    pub(super) devices: Vec<DeviceSpec>,
    pub(super) balance: BalanceBy,
    pub(super) size: MicroBatches,
    /// Schedule; none for the default, which is 1F1B, or breadth-first with offloaded stages.
    pub(super) schedule: Option<Schedule>,
    /// Costs for automatic schedules, from a plan.
    pub(super) recipe: Option<ScheduleRecipe>,
    pub(super) recompute: Recompute,
    /// Recomputation of each stage, if a plan sets it.
    pub(super) recompute_each: Vec<Recompute>,
    pub(super) kind: Kind,
    pub(super) offload: Offload,
    /// Micro-batch with which layers are measured, to plan which stages are offloaded.
    pub(super) sample: Option<Sample>,
    pub(super) boundaries: BoundaryLocations,
    pub(super) offloading: OffloadSettings,
    pub(super) host: Option<Arena>,
    pub(super) non_finite: NonFinitePolicy,
    pub(super) world: World,
    pub(super) replicas: usize,
    pub(super) reserved: Option<Method>,
    pub(super) remembered: Option<PathBuf>,
    pub(super) memory_format: MemoryFormat,
}

impl Builder {
    pub(crate) fn new(layers: Layers) -> Self {
        Self {
            layers,
            devices: vec![DeviceSpec::cpu()],
            balance: BalanceBy::default(),
            size: MicroBatches::Count(1),
            schedule: None,
            recipe: None,
            recompute: Recompute::Never,
            recompute_each: Vec::new(),
            kind: Kind::Float,
            offload: Offload::default(),
            sample: None,
            boundaries: BoundaryLocations::default(),
            offloading: OffloadSettings::default(),
            host: None,
            non_finite: NonFinitePolicy::default(),
            world: World::alone(),
            replicas: 1,
            reserved: None,
            remembered: None,
            memory_format: MemoryFormat::default(),
        }
    }

    /// Sets the devices, in the order of the stages. Each device has one worker thread. A device that no stage
    /// needs is left out. The default is one CPU.
    pub fn devices<D: Into<DeviceSpec>>(self, devices: impl IntoIterator<Item = D>) -> Self {
        Self { devices: devices.into_iter().map(Into::into).collect(), ..self }
    }

    /// Builds one pipeline over the ranks of a world, or one for each [replica](Builder::replicas). The first
    /// stages are on the devices of the pipeline's first rank. Every rank sets its own devices; all other settings
    /// and all calls are equal on all ranks.
    ///
    /// Every replica passes its own samples of each mini-batch, or none. The ranks of one replica pass the same
    /// samples.
    pub fn world(self, world: &World) -> Self {
        Self { world: world.clone(), ..self }
    }

    /// Trains this many pipelines, each on its share of every mini-batch. The default is one.
    ///
    /// In one process, each pipeline gets an equal number of the devices, in order, and every mini-batch is
    /// divided among the pipelines. In a world, each pipeline has an equal number of ranks. `MicroBatches::Count`
    /// is the number of micro-batches of each pipeline, not of all together.
    pub fn replicas(self, replicas: usize) -> Self {
        Self { replicas, ..self }
    }

    /// Reserves memory for the state that an optimizer makes at its first step, until the pipeline's first
    /// step is over: see [`MicroBatcher::reserve`](crate::MicroBatcher::reserve).
    pub fn reserve(self, method: impl Into<Method>) -> Self {
        Self { reserved: Some(method.into()), ..self }
    }

    /// Reads automatic sizes that an earlier run found for this model on these devices, and writes the
    /// sizes of this run to the same file: see [`MicroBatcher::remember`](crate::MicroBatcher::remember).
    pub fn remember(self, path: impl AsRef<Path>) -> Self {
        Self { remembered: Some(path.as_ref().to_owned()), ..self }
    }

    /// Sets the number of layers of each stage. By default, the layers are divided as evenly as possible.
    pub fn balance(self, balance: impl Into<BalanceBy>) -> Self {
        Self { balance: balance.into(), ..self }
    }

    /// Sets how mini-batches are cut into micro-batches. By default, they are not cut.
    pub fn micro_batches(self, micro_batches: MicroBatches) -> Self {
        Self { size: micro_batches, ..self }
    }

    /// Sets the schedule. The default is 1F1B, or breadth-first if stages are [offloaded](Self::offload).
    ///
    /// [`Schedule::Auto`] uses the stages' times if they are known: from a [plan](Self::plan), or from a balance
    /// that measures layers [by time](BalanceBy::by_time). In a world, all ranks use rank 0's times.
    pub fn schedule(self, schedule: Schedule) -> Self {
        Self { schedule: Some(schedule), ..self }
    }

    /// Sets activation recomputation. The default is none.
    pub fn recompute(self, recompute: Recompute) -> Self {
        Self { recompute, recompute_each: Vec::new(), ..self }
    }

    /// Takes balance, schedule, number of micro-batches, and each stage's offload and recomputation from a
    /// row of a plan.
    pub fn plan(self, row: &PlanRow) -> Self {
        let PlanChoice { schedule, micro_batches, recompute } = row.choice;
        let (balance, recipe) = ((&row.balance).into(), row.recipe.clone());
        let schedule = Some(schedule);
        let recompute_each = row.stages.iter().map(|stage| stage.recompute).collect();
        let boundaries = row.stages.iter().map(|stage| stage.boundaries).collect();
        let boundaries = BoundaryLocations::Each(boundaries);
        let of_stages = Self {
            recompute_each,
            offload: row.into(),
            boundaries,
            offloading: OffloadSettings { device_buffers: row.device_buffers, ..self.offloading },
            ..self
        };
        let size = MicroBatches::Count(micro_batches);
        Self { balance, schedule, recipe, size, recompute, ..of_stages }
    }

    /// Sets the parameters' dtype. The default is f32.
    pub fn kind(self, kind: Kind) -> Self {
        Self { kind, ..self }
    }

    /// Sets which stages are offloaded: their weights, gradients and optimizer state are in host memory. By
    /// default, every stage stays on its device.
    ///
    /// An offloaded stage computes on its device: see [`Offload`]. By default, the schedule of offloaded
    /// stages is breadth-first, and with [`Offload::Host`] every layer that has parameters begins a stage.
    pub fn offload(self, offload: impl Into<Offload>) -> Self {
        Self {
            offload: offload.into(),
            boundaries: self.boundaries.unless_planned(),
            offloading: OffloadSettings { device_buffers: DEVICE_BUFFERS, ..self.offloading },
            ..self
        }
    }

    /// Sets where the boundaries of offloaded stages wait. The default is the host. On the device, boundaries take
    /// memory for every micro-batch, but leave the host link to weights and optimizer state.
    pub fn boundaries(self, location: Location) -> Self {
        Self { boundaries: BoundaryLocations::All(location), ..self }
    }

    /// Sets the dtype of a bf16 model's gradients on the host: bf16 takes half the memory and transfers of f32, the
    /// default. Gradients are summed in f32 on the device, and rounded when the mini-batch's sum goes to the host; sums
    /// over several mini-batches are then rounded too. Sums over ranks come back in f32.
    pub fn offload_gradients(self, kind: Kind) -> Self {
        // `None` keeps the dtype of the sums: f32, or f64 for a model in f64.
        let gradient_kind = (kind != Kind::Float).then_some(kind);
        let offloading = OffloadSettings { gradient_kind, ..self.offloading };
        Self { offloading, ..self }
    }

    /// Updates each stage in the backward, as soon as the stage's gradients are complete, instead of after the
    /// backward. Updates then overlap with the rest of the backward. Gradients are not kept, so they can be
    /// neither read nor clipped. Has no effect on a pipeline without offloaded stages.
    ///
    /// A step that fails after its first update cannot be rolled back: it fails with
    /// [`PartlyUpdated`](PipelineError::PartlyUpdated), and the remedy is to load the last checkpoint. A step must be
    /// one mini-batch with a loss whose denominator is known beforehand ([`Loss::mean`](crate::Loss::mean)).
    /// Non-finite losses are refused before the first update, except in
    /// [`Pipeline::backward_from`](crate::Pipeline::backward_from), which does not know the loss. Non-finite
    /// gradients are refused before the update of their stage. A step also refuses the user's own actions if
    /// a stage ends its backward before a later stage that shares its parameters.
    ///
    /// [`build`](Self::build) refuses this setting for offloaded stages on several devices, replicas or ranks.
    pub fn update_in_backward(self, updates_in_backward: bool) -> Self {
        let offloading = OffloadSettings { updates_in_backward, ..self.offloading };
        Self { offloading, ..self }
    }

    /// Sets the arena that offloaded stages are charged to, if the device is a CPU.
    pub fn host(self, arena: Arena) -> Self {
        Self { host: Some(arena), ..self }
    }

    /// Sets the memory format of images and convolutions: see
    /// [`MicroBatcher::memory_format`](crate::MicroBatcher::memory_format). By default, and with offloaded stages,
    /// images and convolutions keep the user's format. In a [world](Self::world), formats are not measured.
    pub fn memory_format(self, memory_format: MemoryFormat) -> Self {
        Self { memory_format, ..self }
    }

    /// Sets the policy for non-finite values. By default, a non-finite loss is refused.
    pub fn non_finite(self, policy: NonFinitePolicy) -> Self {
        Self { non_finite: policy, ..self }
    }

    /// Checks the settings that can be checked without a device.
    pub(super) fn check(&self) -> Result<()> {
        self.layers.check()?;
        if self.layers.is_empty() {
            return Err(PipelineError::NoLayers.into());
        }
        if self.devices.is_empty() {
            return Err(BalanceError::NoStages.into());
        }
        let (devices, replicas) = (self.devices.len(), self.replicas);
        if self.world.size() == 1 && !(replicas > 0 && devices.is_multiple_of(replicas)) {
            return Err(PipelineError::UnevenReplicas { devices, replicas }.into());
        }
        if let Some(gradients) = self.offloading.gradient_kind
            && (gradients, self.kind) != (Kind::BFloat16, Kind::BFloat16)
        {
            let model = format!("{:?}", self.kind);
            let gradients = format!("{gradients:?}");
            return Err(PipelineError::GradientDtype { gradients, model }.into());
        }
        // Refuses a size or count of 0 before anything is built.
        self.size.check()
    }

    /// Returns the schedule that was set, or the default.
    pub(super) fn order(&self) -> Schedule {
        self.schedule.unwrap_or(Schedule::OneFOneB)
    }

    /// Returns the number of micro-batches that is set; if the number depends on the mini-batch, the number of
    /// stages.
    pub(super) fn usual_micro_batches(&self, devices: usize) -> usize {
        match self.size {
            MicroBatches::Count(count) => count,
            _ => devices * self.order().stages_per_device(),
        }
    }
}
