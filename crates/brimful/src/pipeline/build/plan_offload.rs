//! Plans which stages are offloaded, from the measured layers and the memory of devices and host.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use brimful_torch::threads::limit_threads;
use tch::Tensor;

use super::Builder;
use super::building::workers_for;
use super::offload::{Offload, Sample, is_offloadable};
use super::search::{self, Question, ResolvedBalance};
use crate::accumulate::{gradient_factor, sums_apart};
use crate::batch;
use crate::measure::measure_of_kind;
use crate::memory;
use crate::nn::Lora;
use crate::pipeline::error::PipelineError;
use crate::pipeline::offload::measure_host_link;
use crate::step::MicroBatches;
use crate::workers::{DeviceSpec, resolved};
use crate::{Layers, Result};
use brimful_plan::balance::{LayerCost, Profile};
use brimful_plan::bytes::Bytes;
use brimful_plan::plan::{PlanDevice, PlanRow, PlannedStage, PlannedStep, Request, plan};
use brimful_plan::schedule::Recompute;

/// Share of a device's memory that a plan leaves free for the allocator's rounding and fragmentation.
const SPARE: f64 = 0.05;

/// Share of the free host memory that a plan leaves to other processes.
const HOST_SPARE: f64 = 0.1;

/// Layer name under which the loss is measured, after the model's layers.
const LOSS: &str = "loss of the outputs";

/// Number of times that an automatic micro-batch size is halved in search of a plan that fits.
const HALVINGS: u32 = 3;

/// Outcome of a [plan](Builder::plan_offload), which chooses the offloaded stages.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum OffloadPlan {
    /// Keeps the model on its devices: it fits there, or its schedule cannot be offloaded.
    Device,
    /// Offloads every stage: no plan fits, or the builder has a balance, a schedule or exact BatchNorms.
    Host,
    /// Offloads some stages.
    #[non_exhaustive]
    Planned {
        /// Plan of the stages.
        row: Box<PlanRow>,
        /// Bytes that the whole model would need on a device.
        needed: Bytes,
        /// Bytes that the device has.
        memory: Bytes,
    },
}

impl fmt::Display for OffloadPlan {
    /// Writes which stages are offloaded, and why; nothing for a model on its devices.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device => Ok(()),
            Self::Host => f.write_str("offloaded to the host"),
            Self::Planned { row, needed, memory } => {
                let recomputes = |of: &Recompute| *of != Recompute::Never;
                let again = row.stages.iter().filter(|stage| recomputes(&stage.recompute)).count();
                write!(
                    f,
                    "{} of {} stages offloaded to the host ({}), {again} recomputed: the whole model needs \
                     {needed}, and the device has {memory}",
                    row.at_host(),
                    row.stages.len(),
                    Bytes(row.host_bytes),
                )
            }
        }
    }
}

impl Builder {
    /// Sets the inputs and targets of a micro-batch, their loss, and the number of samples per mini-batch:
    /// [`Offload::Auto`] measures the layers with them. The plan has the builder's number of
    /// [micro-batches](Self::micro_batches), whatever the size of this micro-batch. If that number is automatic,
    /// or given by tokens, the plan has micro-batches of this size instead. The optimizer's state is part of the
    /// plan only if the optimizer is [reserved](Self::reserve).
    pub fn sample(
        self,
        (inputs, targets): (&Tensor, &Tensor),
        loss: fn(&Tensor, &Tensor) -> Tensor,
        batch_size: usize,
    ) -> Self {
        let (inputs, targets) = (inputs.shallow_clone(), targets.shallow_clone());
        Self { sample: Some(Sample { inputs, targets, loss, batch_size }), ..self }
    }

    /// Plans which stages are offloaded, as [`build`](Self::build) does for [`Offload::Auto`]. Calls `measured` with
    /// each layer as soon as it is measured. `copies` is the number of further tensors per parameter:
    /// one for averaged weights ([`ema`](crate::Pipeline::ema)), one for gradients that are accumulated over mini-batches.
    ///
    /// # Errors
    /// When the pipeline cannot be built, there is no [sample](Self::sample), a layer cannot be measured, or the
    /// pipeline has several replicas or ranks, each of which would make a different plan.
    #[doc(hidden)]
    pub fn plan_offload(
        &self,
        copies: usize,
        measured: impl FnMut(&LayerCost),
    ) -> Result<OffloadPlan> {
        Ok(self.resolve_offload(copies, measured)?.plan)
    }

    /// Plans as [`plan_offload`](Self::plan_offload); also returns the simulated balance of a model that stays on
    /// its devices.
    fn resolve_offload(
        &self,
        copies: usize,
        measured: impl FnMut(&LayerCost),
    ) -> Result<ResolvedOffload> {
        self.check()?;
        if self.world.size() * self.replicas > 1 {
            return Err(PipelineError::OffloadOfSeveral.into());
        }
        let sample = self.sample.as_ref().ok_or(PipelineError::NoSample)?;
        let devices = resolved(self.devices.clone())?;
        if let Some(stages) = self.balance.stages() {
            workers_for(self.order(), stages, devices.len())?;
        }
        let (gpu, host) = match self.offload {
            Offload::Auto { gpu, host } => (gpu, host),
            _ => (None, None),
        };
        let memory = |device: &DeviceSpec| match (search::limit(device), gpu) {
            (Some(free), Some(Bytes(given))) => Some(free.min(given)),
            (free, given) => free.or(given.map(|given| given.0)),
        };
        let Some(memory) = devices.iter().map(memory).collect::<Option<Vec<u64>>>() else {
            // A device without a limit has memory for everything.
            return Ok(OffloadPlan::Device.into());
        };
        if !self.layers.exact_norms()?.is_empty() {
            return Ok(self.by_fixed_bytes(copies, memory.iter().sum())?.into());
        }
        let profile = self.profile_with_loss(&devices[0], sample, measured)?;
        let batch_size = sample.batch_size;
        let micro_batches = match self.size {
            MicroBatches::Count(count) => count,
            MicroBatches::Samples(samples) => batch_size.div_ceil(samples),
            _ => batch_size.div_ceil(batch::len(&sample.inputs)?.max(1)),
        };
        let planner = OffloadPlanner {
            micro_batches: micro_batches.min(batch_size),
            builder: self,
            batch_size,
            device: &devices[0],
            profile,
            memory,
            host: host.map(|host| host.0),
            trained: trained_share(&self.layers)?,
            copies,
        };
        planner.resolve()
    }

    /// Replaces [`Offload::Auto`] by the outcome of its plan.
    pub(super) fn settle_offload(self) -> Result<Self> {
        if !matches!(self.offload, Offload::Auto { .. }) {
            return Ok(self);
        }
        let size = self.size;
        let ResolvedOffload { plan, resident } = self.resolve_offload(0, |_| {})?;
        Ok(match (plan, resident) {
            // A different balance could need more memory than the simulated one.
            (OffloadPlan::Device, Some(ResolvedBalance { balance, recipe })) => {
                Self { recipe, ..self }.balance(balance).offload(Offload::Device)
            }
            (OffloadPlan::Device, None) => self.offload(Offload::Device),
            (OffloadPlan::Host, _) => self.offload(Offload::Host),
            (OffloadPlan::Planned { row, .. }, _) => self.plan(&row).micro_batches(size),
        })
    }

    /// Returns whether the builder has a balance or a schedule: then a plan must choose neither.
    fn has_own_stages(&self) -> bool {
        self.schedule.is_some() || !self.balance.is_even()
    }

    /// Offloads everything if weights, gradients and optimizer state do not fit on the devices. Activations are
    /// not counted: with exact BatchNorms, those that wait at a barrier go to the host if necessary.
    fn by_fixed_bytes(&self, copies: usize, memory: u64) -> Result<OffloadPlan> {
        let weights = self.layers.parameter_count()? * self.kind.elt_size_in_bytes() as u64;
        let gradient = gradient_factor(self.kind);
        let state = self.reserved.map_or(0.0, |method| method.state_factor_in(self.kind));
        let of_trained = gradient * (1.0 + copies as f64) + state;
        let needed = weights as f64 * (1.0 + trained_share(&self.layers)? * of_trained);
        Ok(if needed <= memory as f64 { OffloadPlan::Device } else { OffloadPlan::Host })
    }

    /// Measures the layers with this micro-batch; the loss counts as part of the last layer.
    fn profile_with_loss(
        &self,
        device: &DeviceSpec,
        sample: &Sample,
        measured: impl FnMut(&LayerCost),
    ) -> Result<Profile> {
        // Uses as many threads as the worker will: with all of the caller's threads, layers would seem faster.
        let _threads = device.threads.map(limit_threads);
        let targets = Mutex::new(sample.targets.f_to_device(device.device)?);
        let loss = sample.loss;
        let layers = self.layers.clone().add_fn(LOSS, move |outputs| {
            let targets = targets.lock().unwrap_or_else(PoisonError::into_inner);
            // Some measurements use only part of the micro-batch.
            loss(outputs, &targets.narrow(0, 0, outputs.size()[0]))
        });
        let mut profile =
            measure_of_kind(&layers, device.device, &sample.inputs, self.kind, measured)?;
        let loss = profile.layers.pop();
        if let Some((last, loss)) = profile.layers.pop().zip(loss) {
            profile.layers.push(last.with_loss(&loss));
        }
        Ok(profile)
    }
}

/// Returns the bytes of host memory that a plan may use.
pub fn free_host_bytes() -> Result<u64> {
    Ok((memory::host_available()?.0 as f64 * (1.0 - HOST_SPARE)) as u64)
}

/// Returns the share of the parameters that is trained, which is small with LoRA.
pub fn trained_share(layers: &Layers) -> Result<f64> {
    let shapes = layers.variable_shapes()?;
    let numbers = |which: fn(&str) -> bool| -> i64 {
        let of_these = shapes.iter().filter(|(name, _)| which(name));
        of_these.map(|(_, shape)| shape.iter().product::<i64>()).sum()
    };
    let (added, all) = (numbers(Lora::is_adapter), numbers(|_| true));
    Ok(if added == 0 { 1.0 } else { added as f64 / all as f64 })
}

/// Plan, and the simulated balance of a model that stays on its devices; none if no balance was simulated.
struct ResolvedOffload {
    plan: OffloadPlan,
    resident: Option<ResolvedBalance>,
}

impl From<OffloadPlan> for ResolvedOffload {
    fn from(plan: OffloadPlan) -> Self {
        Self { plan, resident: None }
    }
}

/// Inputs of a plan: the measured layers, and the memory of devices and host.
struct OffloadPlanner<'a> {
    builder: &'a Builder,
    device: &'a DeviceSpec,
    profile: Profile,
    /// Number of samples of a mini-batch, and number of its micro-batches.
    batch_size: usize,
    micro_batches: usize,
    /// Bytes of each device.
    memory: Vec<u64>,
    /// Bytes of the host, if they are given.
    host: Option<u64>,
    /// Share of the parameters that is trained.
    trained: f64,
    /// Copies of each parameter besides the optimizer's state.
    copies: usize,
}

impl OffloadPlanner<'_> {
    fn resolve(&self) -> Result<ResolvedOffload> {
        let adapts = self.builder.size.is_automatic();
        let mut request = self.request();
        // An automatic size may go down to one sample.
        request.micro_batches = vec![if adapts { self.batch_size } else { self.micro_batches }];
        let resident = self.resident(&request)?;
        let is_kept = self.builder.has_own_stages();
        let stays = is_kept && !is_offloadable(self.builder.order());
        if resident.fits || stays {
            let PlanRow { balance, recipe, .. } = resident;
            let resident = Some(ResolvedBalance { balance, recipe });
            return Ok(ResolvedOffload { plan: OffloadPlan::Device, resident });
        }
        if is_kept {
            return Ok(OffloadPlan::Host.into());
        }
        request.host_link = measure_host_link(self.device.device)?;
        request.host_memory = Some(self.host_bytes()?);
        let halvings = if adapts { HALVINGS } else { 0 };
        for micro_batches in (0..=halvings).map(|halving| self.micro_batches << halving) {
            request.micro_batches = vec![micro_batches.min(self.batch_size)];
            if let Some(row) = plan(&request)?.best() {
                let (row, needed) = (Box::new(row.clone()), Bytes(resident.largest_peak()));
                let memory = Bytes(self.memory[0]);
                return Ok(OffloadPlan::Planned { row, needed, memory }.into());
            }
        }
        // If the model does not fit even with all stages offloaded, the step reports the missing bytes.
        Ok(OffloadPlan::Host.into())
    }

    /// Returns the planned step without offloaded stages: with the builder's balance, or with the best balance if
    /// the builder has none.
    fn resident(&self, request: &Request<'_>) -> Result<PlanRow> {
        let Builder { balance, recompute_each, .. } = self.builder;
        if balance.is_even() {
            return Ok(plan(request)?.rows.swap_remove(0));
        }
        let limits: Vec<_> = self.memory.iter().copied().map(Some).collect();
        let micro_batches = self.builder.usual_micro_batches(limits.len());
        let question =
            Question { builder: self.builder, first: self.device, limits: &limits, micro_batches };
        let ResolvedBalance { balance, recipe } = question.resolve()?;
        let (schedule, stages) = (self.builder.order(), balance.sizes().len());
        let workers = workers_for(schedule, stages, limits.len())?;
        // A device that no stage needs is left out.
        let devices = request.devices[..workers].to_vec();
        let request = Request { devices, ..request.clone() };
        let like = plan(&request)?.rows.swap_remove(0);
        let recompute =
            |stage| recompute_each.get(stage).copied().unwrap_or(self.builder.recompute);
        let row = PlanRow {
            balance,
            recipe: recipe.filter(|recipe| recipe.is_of(schedule, workers)),
            stages: (0..stages).map(|stage| PlannedStage::resident(recompute(stage))).collect(),
            ..like
        };
        let step = PlannedStep::new(&request, &row)?.simulation;
        let judged = PlanRow::new(row.choice, row.balance, &step, &request.devices);
        Ok(PlanRow { recipe: row.recipe, stages: row.stages, ..judged })
    }

    /// Returns the bytes of host memory that a plan may use.
    fn host_bytes(&self) -> Result<u64> {
        match (self.host, self.builder.host_arena_bytes()) {
            (Some(given), Some(free)) => Ok(given.min(free)),
            (given, free) => given.or(free).map_or_else(free_host_bytes, Ok),
        }
    }

    fn request(&self) -> Request<'_> {
        let Builder { kind, offloading, recompute, reserved, .. } = self.builder;
        let spared = |memory: &u64| (*memory as f64 * (1.0 - SPARE)) as u64;
        let limited = |memory| PlanDevice { memory: Some(spared(memory)), ..PlanDevice::default() };
        let gradient = gradient_factor(*kind);
        Request {
            trained: self.trained,
            gradient_bytes: gradient,
            // The factor is 1, because gradients in bf16 are as large as the parameters, which are in bf16 too.
            sent_gradient_bytes: offloading.gradient_kind.map(|_| 1.0),
            sums_apart: sums_apart(self.device.device, *kind),
            optimizer_bytes: reserved.map_or(0.0, |method| method.state_factor_in(*kind)),
            kept_bytes: self.copies as f64 * gradient,
            update_in_backward: offloading.updates_in_backward,
            schedules: vec![self.builder.order()],
            recompute: Some(*recompute),
            ..Request::new(
                &self.profile,
                self.memory.iter().map(limited).collect(),
                self.batch_size,
            )
        }
    }
}
