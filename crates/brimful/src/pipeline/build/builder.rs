//! Describes a pipeline, and checks the whole description before it builds anything.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tch::{Device, Kind};

use super::balance::{BalanceBy, Question, ResolvedBalance};
use super::offload::{
    BoundaryLocations, Offload, bring_together, check_offloaded_graphs, recompute_at_least,
    stage_locations,
};
use super::roster::Roster;
use super::stage_layout::StageLayout;
use crate::balance::{Balance, BalanceError};
use crate::memory::Arena;
use crate::memory_format::{FormatChoice, MemoryFormat, has_channels};
use crate::optim::Method;
use crate::pipeline::error::PipelineError;
use crate::pipeline::offload::DEVICE_BUFFERS;
use crate::pipeline::ranks::Ranks;
use crate::pipeline::worker::{Blueprint, StageBuild, Variable, Worker};
use crate::pipeline::{Pipeline, ranks};
use crate::random::with_step_seed;
use crate::step::{MicroBatches, NonFinitePolicy, StepState, Team};
use crate::workers::{DeviceSpec, SharedWorkers, Workers, resolved};
use crate::{Layers, Result, World};
use brimful_plan::plan::{PlanChoice, PlanRow};
use brimful_plan::schedule::{
    Actions, Location, Recompute, Schedule, ScheduleRecipe, StageId, StageLocation,
};

/// Builder of a pipeline.
#[derive(Debug)]
#[must_use]
pub struct Builder {
    pub(super) layers: Layers,
    pub(super) devices: Vec<DeviceSpec>,
    pub(super) balance: BalanceBy,
    size: MicroBatches,
    /// Unless set, 1F1B, or breadth-first with offloaded stages.
    pub(super) schedule: Option<Schedule>,
    /// Costs for automatic schedules, from a plan.
    pub(super) recipe: Option<ScheduleRecipe>,
    pub(super) recompute: Recompute,
    /// Recomputation of each stage, if a plan sets it.
    recompute_each: Vec<Recompute>,
    pub(super) kind: Kind,
    pub(super) offload: Offload,
    boundaries: BoundaryLocations,
    device_buffers: usize,
    gradient_kind: Option<Kind>,
    pub(super) host: Option<Arena>,
    non_finite: NonFinitePolicy,
    pub(super) world: World,
    pub(super) replicas: usize,
    pub(super) reserved: Option<Method>,
    remembered: Option<PathBuf>,
    memory_format: MemoryFormat,
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
            boundaries: BoundaryLocations::default(),
            device_buffers: DEVICE_BUFFERS,
            gradient_kind: None,
            host: None,
            non_finite: NonFinitePolicy::default(),
            world: World::alone(),
            replicas: 1,
            reserved: None,
            remembered: None,
            memory_format: MemoryFormat::default(),
        }
    }

    /// Sets the devices, in the order of the stages: one worker thread each. A device that no stage needs
    /// is left out. The default is one CPU.
    pub fn devices<D: Into<DeviceSpec>>(self, devices: impl IntoIterator<Item = D>) -> Self {
        Self { devices: devices.into_iter().map(Into::into).collect(), ..self }
    }

    /// Builds one pipeline over the ranks of a world, or as many as there are
    /// [replicas](Builder::replicas); the stages of rank 0's devices come first. Every rank builds the same
    /// pipeline, names its own devices, and makes the same calls.
    ///
    /// Every replica passes its own part of each mini-batch, or an empty one; the ranks of one replica pass
    /// the same.
    pub fn world(self, world: &World) -> Self {
        Self { world: world.clone(), ..self }
    }

    /// Trains so many pipelines, each with its part of every mini-batch. The default is one.
    ///
    /// In one process, each pipeline gets an equal number of the devices, in order, and every mini-batch is
    /// divided among the pipelines. In a world, each pipeline has an equal number of ranks. A number of
    /// micro-batches applies to each pipeline.
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

    /// Sets the number of layers of each stage. By default, all stages get equally many.
    pub fn balance(self, balance: impl Into<BalanceBy>) -> Self {
        Self { balance: balance.into(), ..self }
    }

    /// Sets how mini-batches are cut into micro-batches. By default, they are not cut.
    pub fn micro_batches(self, micro_batches: MicroBatches) -> Self {
        Self { size: micro_batches, ..self }
    }

    /// Sets the schedule. The default is 1F1B, or breadth-first if stages are [offloaded](Self::offload).
    ///
    /// [`Schedule::Auto`] uses the stages' times if they are known: from a [plan](Self::plan), or from a
    /// balance that measures layers [by time](BalanceBy::by_time). Over ranks, rank 0's times count.
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
            device_buffers: row.device_buffers,
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
    /// An offloaded stage computes on its device: see [`Offload`]. Unless they are set, the order of offloaded stages
    /// is breadth-first, and with [`Offload::Host`] every layer that has parameters begins a stage.
    pub fn offload(self, offload: impl Into<Offload>) -> Self {
        Self {
            offload: offload.into(),
            boundaries: self.boundaries.unless_planned(),
            device_buffers: DEVICE_BUFFERS,
            ..self
        }
    }

    /// Sets where the boundaries of offloaded stages wait. By default they wait on the host; on the device, where they
    /// take memory for every micro-batch, they leave the host link to weights and optimizer state.
    pub fn boundaries(self, location: Location) -> Self {
        Self { boundaries: BoundaryLocations::All(location), ..self }
    }

    /// Sets the dtype that gradients in f32 are rounded to on their way to the host, such as bf16 for half the memory
    /// and transfers. By default they stay f32.
    pub fn offload_gradients(self, kind: Kind) -> Self {
        Self { gradient_kind: Some(kind), ..self }
    }

    /// Sets the arena that offloaded stages are charged to, if the device is a CPU.
    pub fn host(self, arena: Arena) -> Self {
        Self { host: Some(arena), ..self }
    }

    /// Sets the memory format of images and convolutions: see
    /// [`MicroBatcher::memory_format`](crate::MicroBatcher::memory_format). By default, and with offloaded stages, they
    /// keep the user's format; in a [world](Self::world) formats are not measured.
    pub fn memory_format(self, memory_format: MemoryFormat) -> Self {
        Self { memory_format, ..self }
    }

    /// Sets the policy for non-finite values. By default, a non-finite loss is refused.
    pub fn non_finite(self, policy: NonFinitePolicy) -> Self {
        Self { non_finite: policy, ..self }
    }

    /// Starts the devices' threads, each of which builds its stages.
    ///
    /// `tch::manual_seed` determines the parameters' initial values, which do not depend on the balance.
    ///
    /// # Errors
    /// When the layers, balance, devices, schedule and number of micro-batches do not fit together, a
    /// device does not exist, or a layer cannot be built.
    pub fn build(self) -> Result<Pipeline> {
        // Not `?`: a rank that cannot build reports that in the handshake, where the others wait for it.
        let request = self.bring();
        let (replicas_here, replicas) = self.replicas_here_and_of_ranks();
        let world = self.world.clone();
        let (devices, roster) = Roster::handshake(&world, replicas, replicas_here, request)?;
        let builder = self.cut_for_offload(roster.limits.len())?;
        builder.build_on(devices, &roster)
    }

    /// Builds the pipeline on these devices of this rank.
    fn build_on(self, devices: Vec<DeviceSpec>, roster: &Roster<'_>) -> Result<Pipeline> {
        let (replicas_here, replicas) = self.replicas_here_and_of_ranks();
        let ResolvedBalance { balance, recipe } = self.resolve_balance(roster, &devices[0])?;
        let (balance, schedule, has_barriers) = self.cut_at_norms(balance)?;
        let workers = workers_for(schedule, balance.sizes().len(), roster.limits.len())?;
        // A plan's costs may be for another schedule, if one was set after the plan.
        let recipe = recipe.filter(|recipe| recipe.is_of(schedule, workers));
        let team = Team { world: self.world.clone(), replicas };
        let mut ranks = Ranks::new(team.clone(), replicas_here, &roster.devices, workers)?;
        let one = schedule.actions(workers, 1, Recompute::Never)?;
        let locations = self.resolve_locations(&balance, &one)?;
        let host_fits = self.check_host(balance.sizes(), &locations, one.placement(), &ranks);
        // Reported in the next handshake, where the other ranks wait.
        let fits = host_fits.and(self.check_lists(schedule, recipe.as_ref(), &one, &locations));
        let build = self.stage_build(&locations);
        let mut state = self.first_state(team);
        // Unchanged unless a dtype was set: a layer may have its own.
        let layers = match self.kind {
            Kind::Float => self.layers,
            kind => self.layers.kind(kind),
        };
        let layout = Arc::new(StageLayout::new(layers, &balance, one.placement())?);
        let devices = used(devices, replicas_here, ranks.here().len());
        let workers = spawn(&layout, &devices, &ranks, &build, fits)?;
        ranks.tie(&workers)?;
        // The seed of the sharing layer drew the copy's values: it takes its owner's instead.
        ranks::spread(&workers, &ranks)?;
        state.reserved = reserved(&workers, self.reserved)?;
        let format_choice = format_choice(&workers, self.memory_format, self.world.size())?;
        Ok(Pipeline {
            workers: SharedWorkers::new(workers),
            layout,
            ranks,
            devices,
            balance,
            schedule,
            recipe,
            recompute: self.recompute,
            has_barriers,
            recompute_each: self.recompute_each,
            locations,
            device_buffers: self.device_buffers,
            actions: HashMap::new(),
            open: None,
            forwards: 0,
            traces_transfers: false,
            state,
            format_choice,
        })
    }

    /// Returns the settings by which every worker builds its stages.
    fn stage_build(&self, locations: &[StageLocation]) -> StageBuild {
        StageBuild {
            keeps_activations: self.recompute == Recompute::Never,
            kind: self.kind,
            non_finite: self.non_finite,
            locations: locations.to_vec(),
            device_buffers: self.device_buffers,
            gradient_kind: self.gradient_kind,
            host: self.host.clone(),
        }
    }

    /// Returns the steps' initial state.
    fn first_state<T>(&self, team: Team) -> StepState<T> {
        let mut state = StepState::new(self.size);
        (state.team, state.non_finite) = (team, self.non_finite);
        self.remembered.iter().for_each(|path| state.remember(path));
        state
    }

    /// Returns the numbers of replicas in this process and over the ranks: a single process has all of them
    /// on its own devices.
    fn replicas_here_and_of_ranks(&self) -> (usize, usize) {
        if self.world.size() == 1 { (self.replicas, 1) } else { (1, self.replicas) }
    }

    /// Returns the balance that all ranks use.
    fn resolve_balance(&self, roster: &Roster, first: &DeviceSpec) -> Result<ResolvedBalance> {
        let limits = &roster.limits;
        let micro_batches = self.usual_micro_batches(limits.len());
        roster.resolve_balance(&Question { builder: self, first, limits, micro_batches })
    }

    /// Returns device or host for each stage.
    fn resolve_locations(
        &self,
        balance: &Balance,
        actions: &Actions,
    ) -> Result<Vec<StageLocation>> {
        let mut locations = self.offload.of(balance.sizes().len())?;
        bring_together(&mut locations, &self.layers, balance, actions.placement())?;
        Ok(stage_locations(&locations, &self.boundaries, actions.placement()))
    }

    /// Checks a list of as many micro-batches as steps will have for graphs of offloaded stages that
    /// outlive their weights, before anything is built. Other lists are checked when they are made.
    fn check_lists(
        &self,
        schedule: Schedule,
        recipe: Option<&ScheduleRecipe>,
        one: &Actions,
        locations: &[StageLocation],
    ) -> Result<()> {
        if locations.iter().all(|location| location.weights == Location::Device) {
            return Ok(());
        }
        let recompute = |stage: StageId| {
            let each = self.recompute_each.get(stage.index()).copied();
            let is_run_again = locations[stage.index()].weights == Location::Host;
            let asked = each.unwrap_or(self.recompute);
            recompute_at_least(asked, is_run_again, Recompute::ExceptLast)
        };
        let micro_batches = self.usual_micro_batches(one.devices());
        let listed = match recipe {
            Some(recipe) => recipe.actions_by_stage(micro_batches, recompute),
            None => schedule.actions_by_stage(one.devices(), micro_batches, recompute),
        };
        // A number of micro-batches that no schedule takes matters only once a mini-batch has it.
        listed.map_or(Ok(()), |listed| {
            check_offloaded_graphs(&listed, locations, self.device_buffers)
        })
    }

    /// Returns this rank's devices, and the settings that must be equal on all ranks.
    fn bring(&self) -> Result<(Vec<DeviceSpec>, String)> {
        self.check()?;
        let mut devices = resolved(self.devices.clone())?;
        if self.size.is_automatic() {
            devices = devices.into_iter().map(DeviceSpec::counted).collect();
        }
        let Self { recompute, recompute_each, kind, offload, size, replicas, .. } = self;
        let schedule = self.order();
        let Self { device_buffers, boundaries, .. } = self;
        let layers = self.layers.names().collect::<Vec<_>>().join(", ");
        let common = format!(
            "{schedule} of {size:?}, recomputing {recompute} {recompute_each:?}, offloading {offload:?} with device buffers for {device_buffers} and boundaries {boundaries:?}, in {kind:?}, {replicas} replicas, with \
             the layers {layers}"
        );
        Ok((devices, common))
    }

    fn check(&self) -> Result<()> {
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
        // Refuses a size or count of 0 before anything is built.
        self.size.check()
    }

    /// Returns the schedule that was set, or the default.
    pub(super) fn order(&self) -> Schedule {
        self.schedule.unwrap_or(Schedule::OneFOneB)
    }

    /// Returns the number of micro-batches, if it does not depend on the mini-batch; otherwise one for each
    /// stage.
    fn usual_micro_batches(&self, devices: usize) -> usize {
        match self.size {
            MicroBatches::Count(count) => count,
            _ => devices * self.order().stages_per_device(),
        }
    }
}

/// Number of workers that so many stages need.
fn workers_for(schedule: Schedule, stages: usize, devices: usize) -> Result<usize> {
    let per_device = schedule.stages_per_device();
    if per_device == 0 || !stages.is_multiple_of(per_device) {
        return Err(PipelineError::UnevenStages { stages, per_device }.into());
    }
    if stages / per_device > devices {
        return Err(PipelineError::TooFewDevices { stages, per_device, devices }.into());
    }
    Ok(stages / per_device)
}

/// Starts this rank's workers, which build their stages, if all ranks have enough free bytes for them.
fn spawn(
    layout: &Arc<StageLayout>,
    devices: &[DeviceSpec],
    ranks: &Ranks,
    build: &StageBuild,
    host_fits: Result<()>,
) -> Result<Workers<Worker>> {
    let seeded = devices.iter().map(|device| device.device).collect();
    with_step_seed(seeded, |seed| {
        let seed = ranks.world().vote("seed", host_fits.and(seed), Duration::ZERO)?[0];
        let here = ranks.here();
        // The host's arena beside a CPU device: offloaded stages are not charged to the device's.
        let host_of = |device: &DeviceSpec| device.arena.as_ref().map(|_| Arena::new("host"));
        let blueprint = |(at, (device, device_lock)): (usize, (&DeviceSpec, _))| Blueprint {
            layout: Arc::clone(layout),
            number: here.start + at % here.len(),
            replica: at / here.len(),
            device: device.clone(),
            device_lock,
            build: StageBuild {
                host: build.host.clone().or_else(|| host_of(device)),
                ..build.clone()
            },
            seed,
        };
        let build = |blueprint: Blueprint| move || Worker::build(&blueprint);
        let own = devices.iter().zip(device_locks(devices)).enumerate();
        let spawned = Workers::spawn(devices, own.map(blueprint).map(build).collect());
        let reported = spawned.as_ref().map(drop).map_err(Clone::clone);
        ranks.world().vote("building the layers", reported, Duration::ZERO)?;
        spawned
    })
}

/// Returns the devices that have a worker, of each pipeline of this process.
fn used(devices: Vec<DeviceSpec>, replicas: usize, workers: usize) -> Vec<DeviceSpec> {
    let each = devices.len() / replicas;
    let used = devices.into_iter().enumerate().filter(|(at, _)| at % each < workers);
    used.map(|(_, device)| device).collect()
}

/// Bytes that an optimizer's state will take on each worker's device; that of offloaded stages is on the
/// host.
fn reserved(workers: &Workers<Worker>, method: Option<Method>) -> Result<Vec<u64>> {
    let Some(method) = method else { return Ok(Vec::new()) };
    workers.all(move |worker| {
        let is_here = |name: &str| {
            worker.site.offloaded.as_ref().and_then(|stages| stages.offload_of(name)).is_none()
        };
        let owned = worker.variables.owned();
        let trained = |variable: &&Variable| variable.trainable && variable.tensor.requires_grad();
        let owned = owned.filter(|variable| trained(variable) && is_here(&variable.name));
        Ok(method.state_bytes(owned.map(|variable| &variable.tensor)))
    })
}

/// Returns the initial memory format of these workers' models. Measured only in a single process, because
/// ranks would choose differently, and only with convolutions.
fn format_choice(
    workers: &Workers<Worker>,
    memory_format: MemoryFormat,
    ranks: usize,
) -> Result<FormatChoice> {
    let convolves = workers.all(|worker| {
        let mut all = worker.variables.all();
        Ok(worker.site.offloaded.is_none() && all.any(|variable| has_channels(&variable.tensor)))
    })?;
    let is_chosen = memory_format != MemoryFormat::Measured || ranks == 1;
    match is_chosen && convolves.contains(&true) {
        true => Ok(FormatChoice::new(memory_format)),
        false => Ok(FormatChoice::default()),
    }
}

/// Returns a lock for each accelerator that several workers share.
fn device_locks(devices: &[DeviceSpec]) -> Vec<Option<Arc<Mutex<()>>>> {
    let mut locks: HashMap<String, Arc<Mutex<()>>> = HashMap::new();
    let shared = |device: &DeviceSpec| {
        let others = devices.iter().filter(|other| other.device == device.device).count();
        (device.device != Device::Cpu && others > 1)
            .then(|| Arc::clone(locks.entry(crate::device::name(device.device)).or_default()))
    };
    devices.iter().map(shared).collect()
}
