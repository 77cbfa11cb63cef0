//! Checks the description of a pipeline, and builds the pipeline.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tch::{Device, Kind};

use super::Builder;
use super::offload::{
    Offload, bring_together, check_offloaded_graphs, recompute_at_least, stage_locations,
};
use super::roster::Roster;
use super::search::{Question, ResolvedBalance};
use crate::Result;
use crate::balance::Balance;
use crate::memory::Arena;
use crate::memory_format::{FormatChoice, MemoryFormat, has_channels};
use crate::pipeline::error::PipelineError;
use crate::pipeline::ranks::Ranks;
use crate::pipeline::site::{Blueprint, StageBuild};
use crate::pipeline::stage_layout::StageLayout;
use crate::pipeline::worker::{Variable, Worker};
use crate::pipeline::{Pipeline, ranks};
use crate::random::with_step_seed;
use crate::step::{StepState, Team};
use crate::update::Method;
use crate::workers::{DeviceSpec, SharedWorkers, Workers, resolved};
use brimful_plan::schedule::{
    Actions, Location, Recompute, Schedule, ScheduleRecipe, StageId, StageLocation,
};

impl Builder {
    /// Builds the pipeline: starts one thread for each device, which builds the device's stages.
    ///
    /// `tch::manual_seed` determines the parameters' initial values, which do not depend on the balance.
    ///
    /// # Errors
    /// When the layers, balance, devices, schedule and number of micro-batches do not fit together, a
    /// device does not exist, or a layer cannot be built.
    pub fn build(self) -> Result<Pipeline> {
        // Only a single process plans. In a world, `bring` refuses `Offload::Auto`, which the handshake reports.
        let builder = if self.world.size() == 1 { self.settle_offload()? } else { self };
        // Not `?`: a rank that cannot build reports its error in the handshake, where the other ranks wait for it.
        let request = builder.bring();
        let (replicas_here, replicas) = builder.replicas_here_and_of_ranks();
        let world = builder.world.clone();
        let (devices, roster) = Roster::handshake(&world, replicas, replicas_here, request)?;
        let builder = builder.cut_for_offload(roster.limits.len())?;
        builder.build_on(devices, &roster)
    }

    /// Builds the pipeline on these devices of this rank.
    fn build_on(self, devices: Vec<DeviceSpec>, roster: &Roster<'_>) -> Result<Pipeline> {
        let (replicas_here, replicas) = self.replicas_here_and_of_ranks();
        let ResolvedBalance { balance, recipe } = self.resolve_balance(roster, &devices[0])?;
        let (balance, schedule, has_barriers) = self.cut_at_norms(balance)?;
        let workers = workers_for(schedule, balance.sizes().len(), roster.limits.len())?;
        // If a schedule was set after the plan, the plan's costs are for a different schedule.
        let recipe = recipe.filter(|recipe| recipe.is_of(schedule, workers));
        let team = Team { world: self.world.clone(), replicas };
        let mut ranks = Ranks::new(team.clone(), replicas_here, &roster.devices, workers)?;
        let one = schedule.actions(workers, 1, Recompute::Never)?;
        let locations = self.resolve_locations(&balance, &one)?;
        let any_offloaded = locations.iter().any(|location| location.weights == Location::Host);
        if self.offloading.updates_in_backward && any_offloaded && workers * self.replicas > 1 {
            return Err(PipelineError::PartsInBackward.into());
        }
        let host_fits = self.check_host(balance.sizes(), &locations, one.placement(), &ranks);
        // An error is reported in the next handshake (in `spawn`), where the other ranks wait.
        let fits = host_fits.and(self.check_lists(schedule, recipe.as_ref(), &one, &locations));
        let build = self.stage_build(&locations);
        let mut state = self.first_state(team);
        // With the default dtype, layers stay unchanged, because a layer may have its own dtype.
        let layers = match self.kind {
            Kind::Float => self.layers,
            kind => self.layers.kind(kind),
        };
        let layout = Arc::new(StageLayout::new(layers, &balance, one.placement())?);
        let devices = used(devices, replicas_here, ranks.here().len());
        let workers = spawn(&layout, &devices, &ranks, &build, fits)?;
        ranks.tie(&workers)?;
        // Copies of a shared variable have initial values from the seed of the sharing layer: replace them by the
        // owner's values.
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
            device_buffers: self.offloading.device_buffers,
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
            offload: self.offloading,
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

    /// Returns the numbers of replicas in this process and over the ranks: a single process has all replicas on
    /// its own devices.
    fn replicas_here_and_of_ranks(&self) -> (usize, usize) {
        if self.world.size() == 1 { (self.replicas, 1) } else { (1, self.replicas) }
    }

    /// Returns the balance that all ranks use.
    fn resolve_balance(&self, roster: &Roster, first: &DeviceSpec) -> Result<ResolvedBalance> {
        let limits = &roster.limits;
        let micro_batches = self.usual_micro_batches(limits.len());
        roster.resolve_balance(&Question { builder: self, first, limits, micro_batches })
    }

    /// Returns the location (device or host) of each stage's weights and boundaries.
    fn resolve_locations(
        &self,
        balance: &Balance,
        actions: &Actions,
    ) -> Result<Vec<StageLocation>> {
        let mut locations = self.offload.of(balance.sizes().len())?;
        bring_together(&mut locations, &self.layers, balance, actions.placement())?;
        Ok(stage_locations(&locations, &self.boundaries, actions.placement()))
    }

    /// Checks before the build that no graph of an offloaded stage outlives the stage's weights. Checks a step of
    /// the usual number of micro-batches. Other lists are checked when they are made.
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
        // Ignores an invalid number of micro-batches: it matters only once a mini-batch is cut into that many.
        listed.map_or(Ok(()), |listed| {
            check_offloaded_graphs(&listed, locations, self.offloading.device_buffers)
        })
    }

    /// Returns this rank's devices, and the settings that must be equal on all ranks.
    fn bring(&self) -> Result<(Vec<DeviceSpec>, String)> {
        self.check()?;
        if let Offload::Auto { .. } = self.offload {
            return Err(PipelineError::OffloadOfSeveral.into());
        }
        let mut devices = resolved(self.devices.clone())?;
        if self.size.is_automatic() {
            devices = devices.into_iter().map(DeviceSpec::counted).collect();
        }
        let Self { recompute, recompute_each, kind, offload, size, replicas, .. } = self;
        let schedule = self.order();
        let Self { offloading, boundaries, .. } = self;
        let layers = self.layers.names().collect::<Vec<_>>().join(", ");
        let common = format!(
            "{schedule} of {size:?}, recomputing {recompute} {recompute_each:?}, offloading {offload:?} with \
             {offloading:?} and boundaries {boundaries:?}, in {kind:?}, {replicas} replicas, with the layers {layers}"
        );
        Ok((devices, common))
    }
}

/// Returns the number of workers that this many stages need.
pub(super) fn workers_for(schedule: Schedule, stages: usize, devices: usize) -> Result<usize> {
    let per_device = schedule.stages_per_device();
    if per_device == 0 || !stages.is_multiple_of(per_device) {
        return Err(PipelineError::UnevenStages { stages, per_device }.into());
    }
    if stages / per_device > devices {
        return Err(PipelineError::TooFewDevices { stages, per_device, devices }.into());
    }
    Ok(stages / per_device)
}

/// Starts this rank's workers, which build their stages, if the checks succeeded on all ranks.
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
        // A CPU device with an arena gets a second arena for the host, to which offloaded stages are charged.
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

/// Returns the bytes that an optimizer's state will take on each worker's device. Does not count offloaded
/// stages, whose state is on the host.
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

/// Returns the choice of a memory format for these workers' models; none keeps the user's format. Models without
/// convolutions or with offloaded stages keep it. Formats are measured only in a single process, because ranks
/// would choose differently.
fn format_choice(
    workers: &Workers<Worker>,
    memory_format: MemoryFormat,
    ranks: usize,
) -> Result<Option<FormatChoice>> {
    if memory_format == MemoryFormat::AsIs {
        return Ok(None);
    }
    let convolves = workers.all(|worker| {
        let mut all = worker.variables.all();
        Ok(worker.site.offloaded.is_none() && all.any(|variable| has_channels(&variable.tensor)))
    })?;
    let is_chosen = memory_format != MemoryFormat::Measured || ranks == 1;
    match is_chosen && convolves.contains(&true) {
        true => Ok(FormatChoice::wanted(memory_format)),
        false => Ok(None),
    }
}

/// Returns a lock for each accelerator that several workers share, and none for the other devices.
fn device_locks(devices: &[DeviceSpec]) -> Vec<Option<Arc<Mutex<()>>>> {
    let mut locks: HashMap<String, Arc<Mutex<()>>> = HashMap::new();
    let shared = |device: &DeviceSpec| {
        let others = devices.iter().filter(|other| other.device == device.device).count();
        (device.device != Device::Cpu && others > 1)
            .then(|| Arc::clone(locks.entry(crate::device::name(device.device)).or_default()))
    };
    devices.iter().map(shared).collect()
}
