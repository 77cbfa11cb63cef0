//! Worker: a thread with its own stages, their variables, and the step that it runs.

mod attempt;
mod commit;
mod variables;

pub(crate) use attempt::{Idle, ReportOptions, WorkerDone};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
pub(crate) use variables::{Variable, Variables};

use brimful_torch::foreach;
use tch::nn::VarStore;
use tch::{Device, Tensor};

use crate::Result;
use crate::copy_streams::CopyStreams;
use crate::memory::{Arena, Memory};
use crate::memory_format::{convert_convolutions, with_channels_last};
use crate::optim::{Ema, Optimizer, OptimizerPlan};
use crate::pipeline::build::{StageLayout, StagePlan};
use crate::pipeline::offload::{HostMemory, OffloadedStage, OffloadedStages};
use crate::pipeline::run::{
    ActivationCache, Boundary, HeldInput, HostLead, HostStaging, InFlight, Stage, StageOutlet,
    StageTransfer, TransferClock, WorkerRun, run_again,
};
use crate::random::{Generator, StepRng};
use crate::step::{NonFinitePolicy, StoreAttempt, Undo, UnmanagedStatistics};
use crate::workers::DeviceSpec;
use brimful_plan::bytes::Bytes;
use brimful_plan::schedule::{
    Action, HostLinkUse, Location, Span, StageId, StageLocation, Transfer, Transfers,
};

/// Specification that a worker is built from.
#[derive(Debug)]
pub(crate) struct Blueprint {
    pub(crate) layout: Arc<StageLayout>,
    /// Number of the worker in its pipeline.
    pub(crate) number: usize,
    /// Index of its pipeline among those of this process.
    pub(crate) replica: usize,
    pub(crate) device: DeviceSpec,
    /// Lock of workers that share an accelerator, and so its random generator.
    pub(crate) device_lock: Option<Arc<Mutex<()>>>,
    pub(crate) build: StageBuild,
    /// Seed of the parameters' initial values.
    pub(crate) seed: u64,
}

/// Settings by which every worker builds its stages.
#[derive(Debug, Clone)]
pub(crate) struct StageBuild {
    pub(crate) kind: tch::Kind,
    /// Device or host for each stage's weights and boundaries; `host` is the arena that those on the host
    /// are charged to.
    pub(crate) locations: Vec<StageLocation>,
    pub(crate) host: Option<Arena>,
    /// Whether to keep activations on a device with enough free bytes.
    pub(crate) keeps_activations: bool,
    /// Number of the device's buffers for offloaded stages.
    pub(crate) device_buffers: usize,
    /// Dtype of gradients in f32 on the host, if not f32.
    pub(crate) gradient_kind: Option<tch::Kind>,
    pub(crate) non_finite: NonFinitePolicy,
}

/// Device and stages of a worker, with all that its steps run on.
#[derive(Debug)]
pub(crate) struct Site {
    pub(crate) device: Device,
    pub(crate) stages: Vec<Stage>,
    /// Copy streams for tensors from other stages, and for the model's inputs, which arrive ahead of their
    /// use.
    pub(crate) copy_streams: CopyStreams,
    pub(crate) inputs: CopyStreams,
    pub(crate) generator: Generator,
    /// Position of the layer that is running.
    pub(crate) layer: Cell<Option<usize>>,
    pub(crate) layout: Arc<StageLayout>,
    device_lock: Option<Arc<Mutex<()>>>,
    /// Whether this worker trains any parameter.
    pub(crate) trains: bool,
    /// Policy for non-finite values.
    pub(crate) non_finite: NonFinitePolicy,
    /// Running statistics that every run updates, as tensors whose changes autograd does not count: it
    /// takes them for inputs of the backward, which they are not.
    pub(crate) unmanaged: Vec<Tensor>,
    /// Offloaded stages of this worker; none if all stay on the device.
    pub(crate) offloaded: Option<OffloadedStages>,
    pub(crate) optimizer: Option<Optimizer>,
    /// Cache of activations that wait at a barrier; none if the device's memory is not counted, or if
    /// stages are offloaded, when all activations wait on the host.
    pub(crate) cache: Option<ActivationCache>,
    /// Device or host for each stage's weights and boundaries; and host staging for activations, none if
    /// none can wait on the host.
    stage_locations: Vec<StageLocation>,
    host_staging: Option<HostStaging>,
    /// Transfers to host staging in flight. A cell, because the methods that send them change nothing else
    /// here.
    in_flight: RefCell<InFlight>,
    lead: HostLead,
    /// Whether images and convolutions are in channels-last memory format.
    channels_last: bool,
    /// Stages already logged as having functions that cannot be split.
    told_of_whole: HashSet<StageId>,
}

/// One thread's part of the pipeline.
pub(crate) struct Worker {
    /// Number of the worker in its pipeline.
    pub(crate) number: usize,
    pub(crate) site: Site,
    pub(crate) variables: Variables,
    pub(crate) memory: Option<Memory>,
    pub(crate) ema: Option<Ema>,
    /// BatchNorm layers that update their statistics at every run, such as tch's own.
    pub(crate) unmanaged: UnmanagedStatistics,
    pub(crate) store: VarStore,
    /// Forward that waits for its backward.
    pub(crate) open: Option<(WorkerRun, Undo)>,
    /// Mini-batch that ran and is not committed.
    pub(crate) attempt: Option<StoreAttempt>,
    /// Earlier mini-batches of the accumulation window, not yet committed.
    pub(crate) window: Option<StoreAttempt>,
    /// Number of stages that the optimizer updated in the last backward.
    pub(crate) updated: usize,
    /// Timed actions of the last mini-batch, and its peak memory.
    pub(crate) spans: Vec<Span>,
    pub(crate) peak: Option<Bytes>,
    /// Timed transfers of the last mini-batch; empty unless the caller asked for them.
    pub(crate) host_link: HostLinkUse,
}

/// Prepared step of a worker's optimizer.
#[derive(Debug)]
pub(crate) struct UpdatePlan {
    here: OptimizerPlan,
    /// By place of an offloaded stage.
    offloaded_parts: BTreeMap<usize, OptimizerPlan>,
}

impl Blueprint {
    /// Builds the stages in this store, and offloads stages one after the other, so that the device never
    /// holds them all.
    fn stages(
        &self,
        store: &VarStore,
        generator: &Generator,
    ) -> Result<(Vec<Stage>, Option<OffloadedStages>)> {
        let Self { layout, number, device_lock, seed, .. } = self;
        let first = StepRng::new(*seed, 0);
        let mut stages = Vec::new();
        let mut offloaded: Vec<Option<OffloadedStage>> = Vec::new();
        let memory = HostMemory { arena: self.build.host.clone(), device: self.device.device };
        for (id, plan) in layout.of_worker(*number) {
            // Held for a whole stage: another worker of this accelerator would draw in between.
            let _alone = device_lock.as_ref().map(taken);
            // Each layer has its own seed, so that initial values do not depend on the balance.
            let built =
                layout.layers.build_range_watched(&store.root(), plan.range.clone(), |position| {
                    generator.seed(first.seed(position))
                });
            stages.push(Stage::new(id, built?, plan));
            offloaded.push(match self.build.locations[id.index()].weights {
                Location::Host => Some(self.copy_to_host(plan, store, &offloaded, &memory)?),
                Location::Device => None,
            });
        }
        let StageBuild { device_buffers, gradient_kind, .. } = self.build;
        Ok((stages, OffloadedStages::new(offloaded, memory, device_buffers, gradient_kind)?))
    }

    /// Builds the stages in this store, and all that they need to run.
    fn site(&self, store: &VarStore) -> Result<Site> {
        let device = self.device.device;
        // Before the layers, which on a CPU would otherwise draw from the generator that all threads share.
        let generator = Generator::new(device);
        let (stages, offloaded) = self.stages(store, &generator)?;
        let cache = self.activation_cache(&stages, offloaded.as_ref());
        Ok(Site {
            device,
            stages,
            // Two, each with its own streams: a neighbour's gradient must not queue behind the next inputs.
            copy_streams: CopyStreams::new(device),
            inputs: CopyStreams::new(device),
            generator,
            device_lock: self.device_lock.clone(),
            layer: Cell::new(None),
            layout: Arc::clone(&self.layout),
            trains: true,
            non_finite: self.build.non_finite,
            unmanaged: Vec::new(),
            host_staging: self.host_staging(offloaded.as_ref(), cache.is_some())?,
            in_flight: RefCell::default(),
            lead: HostLead::new(device),
            cache,
            offloaded,
            optimizer: None,
            stage_locations: self.build.locations.clone(),
            channels_last: false,
            told_of_whole: HashSet::new(),
        })
    }

    /// Makes host staging for boundaries; none if none can wait on the host.
    fn host_staging(
        &self,
        offloaded: Option<&OffloadedStages>,
        may_be_full: bool,
    ) -> Result<Option<HostStaging>> {
        let StageBuild { locations: stages, host, .. } = &self.build;
        if !may_be_full && stages.iter().all(|location| location.boundaries == Location::Device) {
            return Ok(None);
        }
        // All copies to the host share one stream.
        let shared = offloaded.map(|offloaded| offloaded.outward.clone());
        let own = || HostStaging::new(self.device.device, host.clone());
        shared.map_or_else(own, Ok).map(Some)
    }

    /// Makes the activation cache, if micro-batches meet at a barrier on a device whose memory is counted.
    fn activation_cache(
        &self,
        stages: &[Stage],
        offloaded: Option<&OffloadedStages>,
    ) -> Option<ActivationCache> {
        let has_barriers =
            offloaded.is_none() && stages.iter().any(|stage| stage.exact_norm().is_some());
        let memory = self.device.memory().filter(|_| has_barriers)?;
        Some(ActivationCache::new(memory, self.build.keeps_activations))
    }

    /// Offloads the stage's parameters, frozen ones too. Running statistics stay on the device: they are
    /// small, and every micro-batch updates them.
    fn copy_to_host(
        &self,
        plan: &StagePlan,
        store: &VarStore,
        earlier: &[Option<OffloadedStage>],
        memory: &HostMemory,
    ) -> Result<OffloadedStage> {
        let places: HashSet<_> = store.trainable_variables().iter().map(Tensor::data_ptr).collect();
        let mut own: Vec<_> = (store.variables().into_iter())
            .filter(|(name, tensor)| {
                let is_parameter = tensor.numel() > 0 && places.contains(&tensor.data_ptr());
                is_parameter && self.layout.uses(plan, name)
            })
            .collect();
        own.sort_by(|(a, _), (b, _)| a.cmp(b));
        let mut shared = Vec::new();
        own.retain(|(name, _)| {
            let on_host = earlier.iter().flatten().find_map(|stage| stage.share(name));
            let is_new = on_host.is_none();
            shared.extend(on_host);
            is_new
        });
        OffloadedStage::take_in(own, shared, self.build.kind, memory)
    }
}

impl Site {
    /// Runs one of the stages, with these random numbers for its layers.
    pub(crate) fn run(&self, at: usize, input: Boundary, rng: StepRng, train: bool) -> Boundary {
        // Held until all kernels are launched, not until they are done: a kernel gets its random state at
        // its launch.
        let _alone = self.lock_device();
        let output = self.stages[at].run(input, train, |position| {
            self.layer.set(Some(position));
            self.generator.seed(rng.seed(position));
        });
        self.layer.set(None);
        output
    }

    /// Runs a stage for activation recomputation, without an update of running statistics.
    pub(crate) fn run_again(&self, at: usize, input: Boundary, rng: StepRng) -> Result<Boundary> {
        // Layers that update their statistics at every run would do so in this run too.
        let copy = |running: &Tensor| Ok(running.f_detach_copy()?);
        let before = self.unmanaged.iter().map(copy).collect::<Result<Vec<_>>>()?;
        let output = run_again(|| self.run(at, input, rng, true));
        if !before.is_empty() {
            foreach::copy(&self.unmanaged, &before)?;
        }
        Ok(output)
    }

    /// Returns the model's input, in channels-last memory format if its convolutions have that.
    pub(crate) fn formatted(&self, values: Vec<Tensor>) -> Result<Vec<Tensor>> {
        match self.channels_last {
            true => values.iter().map(with_channels_last).collect(),
            false => Ok(values),
        }
    }

    /// Returns the number of the fetch that a graph of the stage made now refers to; none if the stage
    /// stays on the device.
    pub(crate) fn generation(&self, at: usize) -> Option<u64> {
        self.offloaded.as_ref().and_then(|offloaded| offloaded.generation(at))
    }

    /// Returns a stage's place among this worker's.
    pub(crate) fn place_of(&self, stage: StageId) -> Option<usize> {
        self.stages.iter().position(|own| own.id == stage)
    }

    /// Returns the transfers of this list of actions.
    pub(crate) fn transfers(&self, list: &[Action]) -> Result<Vec<Transfer>> {
        if !self.has_transfers() {
            return Ok(Vec::new());
        }
        let location = |(j, location): (usize, &StageLocation)| {
            let at = self.place_of(StageId::at(j));
            let offloaded = at.and_then(|at| self.offloaded.as_ref()?.is_trained(at));
            match offloaded {
                Some(trained) => StageLocation { trained, ..*location },
                None => StageLocation { weights: Location::Device, ..*location },
            }
        };
        let locations: Vec<_> = self.stage_locations.iter().enumerate().map(location).collect();
        let device_buffers = self.offloaded.as_ref().map_or(0, OffloadedStages::device_buffers);
        Ok(Transfers::of_lists(&[list.to_vec()], &locations, device_buffers)?.of(0).to_vec())
    }

    /// Returns whether weights or boundaries cross the host link by plan.
    fn has_transfers(&self) -> bool {
        self.offloaded.is_some()
            || self.stage_locations.iter().any(|location| location.boundaries == Location::Host)
    }

    /// Returns host staging if the stage's input waits there, as planned or because the device is full.
    fn host_staging_of(&self, stage: StageId) -> Option<&HostStaging> {
        let location = self.stage_locations.get(stage.index())?;
        let is_full = self.cache.as_ref().is_some_and(ActivationCache::is_full);
        self.host_staging.as_ref().filter(|_| location.boundaries == Location::Host || is_full)
    }

    /// Returns whether the device has free bytes for stages' inputs until their backward.
    pub(crate) fn keeps_inputs(&self) -> bool {
        self.cache.as_ref().is_none_or(ActivationCache::keeps_inputs)
    }

    /// Transfers tensors that enter a stage, or come back from it, to host staging if they wait there, as this
    /// transfer: all micro-batches may pass a stage before the next one takes the first output.
    pub(crate) fn finish_transfer(
        &self,
        transfer: StageTransfer,
        outlet: &StageOutlet,
        one: Transfer,
        clock: &mut TransferClock,
    ) -> Result<StageTransfer> {
        match (outlet, self.host_staging_of(one.stage)) {
            (StageOutlet::Far(_), _) => Ok(transfer),
            (_, Some(host)) => self.leave(transfer, host, one, clock),
            // No event: each would cost as much as a launch.
            (StageOutlet::Own(_), None) => Ok(transfer),
            (StageOutlet::Near(_), None) => transfer.with_event(self.device),
        }
    }

    /// Keeps a stage's input until its recomputation: on the host, if anything can wait there.
    pub(crate) fn stage_input(
        &self,
        input: Boundary,
        one: Transfer,
        clock: &mut TransferClock,
    ) -> Result<HeldInput> {
        let Some(host) = &self.host_staging else { return Ok(HeldInput::Here(input)) };
        let Boundary { values, skips, .. } = input;
        let mut transfers = Vec::new();
        for values in std::iter::once(values).chain(skips) {
            transfers.push(self.leave(StageTransfer::values(values), host, one, clock)?);
        }
        Ok(HeldInput::Host(transfers))
    }

    /// Copies tensors to host staging.
    fn leave(
        &self,
        transfer: StageTransfer,
        host: &HostStaging,
        one: Transfer,
        clock: &mut TransferClock,
    ) -> Result<StageTransfer> {
        let transfer = transfer.stage(host, one, clock)?;
        if self.cache.is_some()
            && let Some((there, bytes)) = transfer.completion()
        {
            self.in_flight.borrow_mut().add(there, bytes)?;
        }
        Ok(transfer)
    }

    /// Waits while the device is far behind: a host far ahead of the transfers would fill the device.
    pub(crate) fn keep_pace(&mut self) -> Result<()> {
        if self.has_transfers() || !self.keeps_inputs() { self.lead.keep() } else { Ok(()) }
    }

    /// Measures the free bytes that the next action leaves for cached activations.
    pub(crate) fn look_for_free_memory(&mut self, clock: &mut TransferClock) -> Result<()> {
        let in_flight = self.in_flight.get_mut();
        self.cache.as_mut().map_or(Ok(()), |cache| cache.look(in_flight, clock))
    }

    /// Logs once that a stage has custom autograd functions, which run unsplit.
    pub(crate) fn tell_of_whole(&mut self, at: usize, functions: &str) {
        let stage = self.stages[at].id;
        if self.told_of_whole.insert(stage) {
            let range = self.layout.stages[stage.index()].range.clone();
            let (first, last) = (self.layer_name(range.start), self.layer_name(range.end - 1));
            tracing::info!(
                %stage, first, last, functions,
                "custom autograd functions cannot be split into dX and dW: their weights' gradients are \
                 computed with their inputs'"
            );
        }
    }

    /// Transfers all offloaded parameters to the host, and adds up their gradients if the step succeeded.
    pub(crate) fn offload_all(&mut self, run: &mut WorkerRun, went_well: bool) -> Result<()> {
        let Some(offloaded) = &mut self.offloaded else { return Ok(()) };
        offloaded.offload_all()?;
        match run.accumulator.as_mut().filter(|_| went_well) {
            Some(accumulator) => offloaded.finish(accumulator),
            None => offloaded.forget(&mut run.transfer_clock),
        }
    }

    /// Waits until no other worker draws from the same generator.
    pub(crate) fn lock_device(&self) -> Option<MutexGuard<'_, ()>> {
        self.device_lock.as_ref().map(taken)
    }

    pub(crate) fn layer_name(&self, position: usize) -> String {
        self.layout.layers.names().nth(position).unwrap_or_default().to_owned()
    }
}

impl Worker {
    /// Builds the worker's stages, on its own thread.
    pub(crate) fn build(blueprint: &Blueprint) -> Result<Self> {
        let Blueprint { layout, number, replica, device, .. } = blueprint;
        let store = VarStore::new(device.device);
        let site = blueprint.site(&store)?;
        Ok(Self {
            number: *number,
            site,
            variables: Variables::of(&store, layout, *number, *replica),
            memory: device.memory(),
            ema: None,
            unmanaged: UnmanagedStatistics::default(),
            store,
            open: None,
            attempt: None,
            window: None,
            updated: 0,
            spans: Vec::new(),
            peak: None,
            host_link: HostLinkUse::default(),
        })
    }

    /// Changes the parameters' memory format for the next run.
    fn convert(&mut self, channels_last: bool) -> Result<()> {
        // Not within an accumulation window, whose sums have the parameters' first memory format; nor for
        // offloaded stages, whose host buffers have theirs.
        let stays = self.window.is_some() || self.site.offloaded.is_some();
        if stays || self.site.channels_last == channels_last {
            return Ok(());
        }
        convert_convolutions(self.variables.all().map(|v| &v.tensor), channels_last)?;
        self.site.channels_last = channels_last;
        Ok(())
    }

    /// Finishes the last step's updates.
    ///
    /// # Errors
    /// When one of them fails.
    pub(crate) fn finish_updates(&mut self) -> Result<()> {
        let Site { offloaded, optimizer, .. } = &mut self.site;
        let Some(offloaded) = offloaded else { return Ok(()) };
        let finished = offloaded.finish_updates(optimizer.as_mut());
        finished.and(offloaded.offload_all())
    }

    /// Prepares a step of the optimizer: for parameters on the device, and for each offloaded stage.
    pub(crate) fn prepare_update(&mut self) -> Result<UpdatePlan> {
        self.finish_updates()?;
        let Site { offloaded, optimizer, .. } = &mut self.site;
        let optimizer = optimizer.as_mut().expect("it was made on every worker");
        if let Some(offloaded) = offloaded {
            offloaded.reserve_updates(optimizer)?;
        }
        let (here, offloaded_parts) = optimizer.prepare()?.split();
        if let Some(offloaded) = offloaded {
            offloaded.reserve_for(&offloaded_parts)?;
        }
        Ok(UpdatePlan { here, offloaded_parts })
    }

    /// Applies the optimizer's prepared step: at once for parameters on the device, at their next fetch for
    /// offloaded ones.
    pub(crate) fn update(&mut self, plan: UpdatePlan) -> Result<()> {
        let UpdatePlan { here, offloaded_parts } = plan;
        let optimizer = self.site.optimizer.as_mut().expect("it has prepared this");
        optimizer.commit(here)?;
        if let Some(offloaded) = &mut self.site.offloaded {
            offloaded.put_off(offloaded_parts);
        }
        Ok(())
    }
}

/// Locks the generator; a panic of a layer that held it leaves nothing inconsistent.
fn taken(device_lock: &Arc<Mutex<()>>) -> MutexGuard<'_, ()> {
    device_lock.lock().unwrap_or_else(PoisonError::into_inner)
}
