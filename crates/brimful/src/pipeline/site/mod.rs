//! Site of a worker: its device, its stages, and the buffers and caches of their tensors.

mod activation_cache;
mod blueprint;
mod stage;

pub(crate) use activation_cache::{ActivationCache, InFlight, StepExtent};
pub(crate) use blueprint::{Blueprint, StageBuild};
pub(crate) use stage::{Boundary, Stage, leaves};
use std::cell::{Cell, RefCell};
use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use brimful_torch::foreach;
use brimful_torch::stream::{Event, Stream};
use tch::{Device, Tensor};

use crate::Result;
use crate::memory_format::with_channels_last;
use crate::pipeline::offload::OffloadedStages;
use crate::pipeline::stage_layout::StageLayout;
use crate::pipeline::transfers::{HostStaging, StageTransfer, TransferClock};
use crate::random::{Generator, StepRng};
use crate::statistics::Collecting;
use crate::step::NonFinitePolicy;
use crate::streams::CopyStreams;
use crate::update::OptimizerPart;
use brimful_plan::schedule::{Action, Location, StageId, StageLocation, Transfer, Transfers};

/// Number of actions that the host may be ahead of the device.
const AHEAD: usize = 3;

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
    /// Running statistics that every run updates, as tensors whose changes autograd does not count. Autograd
    /// saves the statistics for the backward, which would otherwise refuse to run after a change.
    pub(crate) unmanaged: Vec<Tensor>,
    /// Offloaded stages of this worker; none if all stay on the device.
    pub(crate) offloaded: Option<OffloadedStages>,
    pub(crate) optimizer: Option<OptimizerPart>,
    /// Cache of activations that wait at a barrier; none if the device's memory is not counted, or if stages are
    /// offloaded, because boundaries of offloaded stages wait where the user has set.
    pub(crate) cache: Option<ActivationCache>,
    /// Device or host for each stage's weights and boundaries; and host staging for activations, none if no
    /// activation can wait on the host.
    stage_locations: Vec<StageLocation>,
    host_staging: Option<HostStaging>,
    /// Transfers to host staging in flight. A cell, because the methods that send them change nothing else
    /// here.
    in_flight: RefCell<InFlight>,
    lead: HostLead,
    /// Whether images and convolutions are in channels-last memory format.
    pub(crate) channels_last: bool,
    /// Stages already logged as having functions that cannot be split.
    told_of_whole: HashSet<StageId>,
}

/// Input of a stage, kept for recomputation or as the end of its backward.
pub(crate) enum HeldInput {
    Here(Boundary),
    /// Transfers on the host: the values, then each skip.
    Host(Vec<StageTransfer>),
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
        let recomputing = Recomputing::begin();
        let output = self.run(at, input, rng, true);
        drop(recomputing);
        if !before.is_empty() {
            foreach::copy(&self.unmanaged, &before)?;
        }
        Ok(output)
    }

    /// Returns the model's input, in channels-last memory format if its convolutions have that format.
    pub(crate) fn formatted(&self, values: Vec<Tensor>) -> Result<Vec<Tensor>> {
        match self.channels_last {
            true => values.iter().map(with_channels_last).collect(),
            false => Ok(values),
        }
    }

    /// Returns the number of the fetch that brought the stage's current weights, which a graph made now
    /// refers to; none if the stage stays on the device.
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
    pub(crate) fn host_staging_of(&self, stage: StageId) -> Option<&HostStaging> {
        let location = self.stage_locations.get(stage.index())?;
        let is_full = self.cache.as_ref().is_some_and(ActivationCache::is_full);
        self.host_staging.as_ref().filter(|_| location.boundaries == Location::Host || is_full)
    }

    /// Returns whether the device has free bytes for stages' inputs until their backward.
    pub(crate) fn keeps_inputs(&self) -> bool {
        self.cache.as_ref().is_none_or(ActivationCache::keeps_inputs)
    }

    /// Keeps a stage's input until its recomputation: on the host if there is host staging.
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
    pub(crate) fn leave(
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

    /// Waits while the device is far behind, because a host that runs far ahead would fill the device's memory.
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

    /// Locks the random generator of a device that several workers share.
    pub(crate) fn lock_device(&self) -> Option<MutexGuard<'_, ()>> {
        self.device_lock.as_ref().map(taken)
    }

    pub(crate) fn layer_name(&self, position: usize) -> String {
        self.layout.layers.names().nth(position).unwrap_or_default().to_owned()
    }
}

/// Locks the generator; a panic of a layer that held it leaves nothing inconsistent.
fn taken(device_lock: &Arc<Mutex<()>>) -> MutexGuard<'_, ()> {
    device_lock.lock().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    static RECOMPUTING: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether the calling layer runs for activation recomputation. A recomputation draws the random numbers
/// of the first run, and this library's BatchNorm does not count it. A layer with its own side effects can call
/// this function to skip them in a recomputation.
#[must_use]
pub fn is_recomputing() -> bool {
    RECOMPUTING.get()
}

/// Guard during which a forward runs for activation recomputation: [`is_recomputing`] returns true, and running
/// statistics do not count the forward.
struct Recomputing {
    /// Keeps this library's BatchNorm from counting.
    _statistics: Collecting,
}

impl Recomputing {
    fn begin() -> Self {
        // Lets layers skip their own side effects.
        RECOMPUTING.set(true);
        Self { _statistics: Collecting::begin(true) }
    }
}

impl Drop for Recomputing {
    fn drop(&mut self) {
        RECOMPUTING.set(false);
    }
}

/// Events after the last few actions, which keep the host from running far ahead of the device: memory that an
/// action frees can be used again only once the device has done the action.
#[derive(Debug)]
struct HostLead {
    device: Device,
    reached: VecDeque<Event>,
}

impl HostLead {
    fn new(device: Device) -> Self {
        Self { device, reached: VecDeque::new() }
    }

    /// Waits until the device is at most a few actions behind.
    fn keep(&mut self) -> Result<()> {
        if self.device == Device::Cpu {
            return Ok(());
        }
        if self.reached.len() == AHEAD
            && let Some(earliest) = self.reached.pop_front()
        {
            earliest.synchronize()?;
        }
        self.reached.push_back(Event::after(Stream::current(self.device)?)?);
        Ok(())
    }
}
