//! Offloads stages to host memory: weights come to the device when they are needed, gradients go to the
//! host when they are complete, and the optimizer updates the weights there.
//!
//! ```text
//!   host      weights ──┐                    ┌──▶ gradients ── optimizer ──▶ weights
//!             one host buffer a stage        │    one host buffer a stage   a thread of its own
//!               host-to-device stream   device-to-host stream
//!   device    buffer 0 │ buffer 1 ── compute ──▶ summed gradients of one stage
//! ```
//!
//! A parameter is one tensor for layers, optimizer and files. Its storage is the host buffer's; while its
//! stage is on the device it is the device buffer's, and a step uses it like any other parameter. Between
//! steps, and after one that failed, every offloaded parameter is on the host.

mod device_buffers;
mod speed;
mod stage;
mod update;

pub use speed::HostSpeed;
pub(crate) use stage::{HostMemory, OffloadedStage};
use update::{NotStarted, StageGradients, Update, UpdateTask};

use std::thread;

use brimful_torch::stream::{Event, Stream};
use brimful_torch::threads::threads;
use tch::{Device, Tensor};

use crate::Result;
use crate::accumulate::{Accumulator, Sum};
use crate::batch::tensor_bytes;
use crate::optim::{FIRST_PART, OffloadedParameter, Optimizer, OptimizerPlan};
use crate::pipeline::run::{HostStaging, TransferClock};
use brimful_plan::schedule::{Awaited, Transfer};
use device_buffers::DeviceBuffers;

/// Default number of device buffers: one stage computes while the next one's weights arrive.
pub(crate) const DEVICE_BUFFERS: usize = 2;

/// Offloaded stages of a worker.
#[derive(Debug)]
pub(crate) struct OffloadedStages {
    memory: HostMemory,
    /// By place among the worker's stages; none for stages that stay on the device.
    stages: Vec<Option<OffloadedStage>>,
    device_buffers: DeviceBuffers,
    /// Stages whose last update must finish before their weights are fetched.
    late: Vec<(usize, Transfer)>,
    /// Device-to-host staging for gradients and boundaries.
    pub(crate) outward: HostStaging,
    /// Host address of each parameter of the step under way.
    places: Vec<usize>,
    /// Gradients that are being copied to the host, and the event at which they have arrived.
    in_flight: Option<(Vec<Sum>, Event)>,
    /// Gradients on the host, arrived or in flight, by stage in the order in which they were sent, then by
    /// group of terms.
    on_host: Vec<Vec<Sum>>,
    /// When the optimizer gets gradients, and those of the step under way that it gets before its step.
    pub(crate) hands_over: HandsOver,
    handing: Option<Handing>,
    /// Number of steps without speculative updates, because the last ones went unused.
    pause: usize,
    update: Option<Update>,
}

/// Steps without speculative updates after a step that could not use them, as with clipped gradients.
const PAUSE: usize = 8;

/// Time at which the host optimizer gets a step's gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HandsOver {
    /// At the optimizer's step.
    AtTheStep,
    /// Stage by stage during the backward, to compute the update speculatively beside the current state.
    Ahead,
    /// Stage by stage during the backward, to update the parameters at once.
    InBackward,
}

/// Gradients of the backward under way that the optimizer gets before its step.
#[derive(Debug, Default)]
struct Handing {
    /// Gradients of stages whose parameters are still in device buffers.
    waiting: Vec<(usize, StageGradients)>,
    /// Gradients of tied parameters, complete once the owning stage has run.
    shared: Vec<(String, Tensor)>,
    /// Number of stages whose gradients the optimizer got.
    given: usize,
}

impl OffloadedStages {
    /// Makes the device buffers; returns none if every stage stays on the device.
    pub(crate) fn new(
        stages: Vec<Option<OffloadedStage>>,
        memory: HostMemory,
        device_buffers: usize,
    ) -> Result<Option<Self>> {
        let Some(largest) = stages.iter().flatten().map(|stage| stage.buffer_bytes).max() else {
            return Ok(None);
        };
        let device_buffers = device_buffers.min(stages.iter().flatten().count());
        Ok(Some(Self {
            device_buffers: DeviceBuffers::new(memory.device, device_buffers, largest)?,
            outward: HostStaging::new(memory.device, memory.arena.clone())?,
            late: Vec::new(),
            places: Vec::new(),
            in_flight: None,
            on_host: Vec::new(),
            hands_over: HandsOver::AtTheStep,
            handing: None,
            pause: 0,
            update: None,
            memory,
            stages,
        }))
    }

    /// Returns whether the stage at this place has trained parameters; none for a stage that stays on the
    /// device.
    pub(crate) fn is_trained(&self, at: usize) -> Option<bool> {
        self.stages[at].as_ref().map(OffloadedStage::is_trained)
    }

    /// Returns the places (owner, user) of stages that share a trained parameter.
    pub(crate) fn ties(&self) -> impl Iterator<Item = (usize, usize)> {
        let offloaded =
            || self.stages.iter().enumerate().filter_map(|(at, s)| Some((at, s.as_ref()?)));
        let owner = move |name: &str| Some(offloaded().find(|(_, stage)| stage.owns(name))?.0);
        offloaded().flat_map(move |(user, stage)| {
            stage.trained_guests().filter_map(owner).map(move |owner| (owner, user))
        })
    }

    /// Number of offloaded stages.
    pub(crate) fn count(&self) -> usize {
        self.stages.iter().flatten().count()
    }

    /// Number of device buffers.
    pub(crate) fn device_buffers(&self) -> usize {
        self.device_buffers.count
    }

    /// Begins a step that sums the gradients of these parameters, all of which are on the host.
    pub(crate) fn begin(&mut self, parameters: &[Tensor]) {
        self.places = parameters.iter().map(|p| p.data_ptr() as usize).collect();
        self.on_host.clear();
    }

    /// Starts to fetch a stage's weights into a device buffer, at once or when its last update is done; the
    /// stage before it computes meanwhile.
    pub(crate) fn fetch(
        &mut self,
        at: usize,
        one: Transfer,
        clock: &mut TransferClock,
    ) -> Result<()> {
        self.late.push((at, one));
        self.fetch_late(clock)
    }

    /// Starts the late fetches of stages whose last update is done.
    fn fetch_late(&mut self, clock: &mut TransferClock) -> Result<()> {
        let late = std::mem::take(&mut self.late);
        let updates_in_backward = self.updates_in_backward();
        let mut update = self.update.as_mut().filter(|_| !updates_in_backward);
        let mut is_done = |at| update.as_mut().is_none_or(|update| update.has_done(at));
        let (done, late) = late.into_iter().partition::<Vec<_>, _>(|(at, _)| is_done(*at));
        self.late = late;
        done.into_iter().try_for_each(|(at, one)| self.bring(at, one, clock))
    }

    /// Waits for the stage's last update, and fetches its weights: as the transfer that is late, or as this
    /// one.
    fn fetch_now(&mut self, at: usize, one: Transfer, clock: &mut TransferClock) -> Result<()> {
        let late = self.late.iter().position(|(late, _)| *late == at);
        let one = late.map_or(one, |late| self.late.remove(late).1);
        let updates_in_backward = self.updates_in_backward();
        if let Some(update) = self.update.as_mut().filter(|_| !updates_in_backward) {
            clock.waiting(Awaited::Update, || {
                update.wait_for(at);
                Ok(())
            })?;
        }
        self.bring(at, one, clock)
    }

    fn bring(&mut self, at: usize, one: Transfer, clock: &mut TransferClock) -> Result<()> {
        let stage = self.stages[at].as_ref();
        stage.map_or(Ok(()), |stage| self.device_buffers.fetch(at, stage, one, clock))
    }

    /// Points a stage's parameters to its device buffer, and makes this thread's work wait for the weights.
    /// Fetches them first, as this transfer, if no buffer holds them.
    pub(crate) fn enter(
        &mut self,
        at: usize,
        one: Transfer,
        clock: &mut TransferClock,
    ) -> Result<()> {
        self.fetch_late(clock)?;
        if self.stages[at].is_none() || self.device_buffers.is_current(at) {
            return Ok(());
        }
        // Either the fetch is late, or the list of transfers was interrupted: a loss on all outputs sends
        // every stage to the host between forward and backward. In both cases a buffer is free, because
        // fewer stages are on the device than the list assumes, and the list never needs more buffers than
        // there are.
        if !self.device_buffers.has(at) {
            self.fetch_now(at, one, clock)?;
        }
        let Some(stage) = &self.stages[at] else { return Ok(()) };
        self.device_buffers.enter(at, stage, clock)
    }

    /// Returns the number of the fetch that brought a stage's weights to the device; none if the stage is
    /// not in a device buffer.
    pub(crate) fn generation(&self, at: usize) -> Option<u64> {
        self.device_buffers.generation(at)
    }

    /// Frees a stage's device buffer.
    pub(crate) fn release(&mut self, at: usize) -> Result<()> {
        self.stages[at].as_ref().map_or(Ok(()), |stage| self.device_buffers.release(at, stage))?;
        self.give_gradients(|stage| stage == at);
        Ok(())
    }

    /// Starts to hand gradients to the optimizer during a step's backward, for updates at once or
    /// speculative ones. The optimizer is either idle here or still at work on its last update.
    pub(crate) fn begin_handing(&mut self, here: &mut Option<Optimizer>) -> Result<()> {
        if let Some(optimizer) = here.take()
            && let Err(refused) = self.start_update(optimizer, None, self.hands_over)
        {
            *here = Some(refused.optimizer);
            return Err(refused.error);
        }
        self.handing = Some(Handing::default());
        Ok(())
    }

    /// Returns whether the optimizer got gradients for speculative updates.
    pub(crate) fn is_looking_ahead(&self) -> bool {
        self.update.as_ref().is_some_and(|update| update.looks_ahead)
    }

    /// Returns whether to compute updates speculatively in the step that begins.
    pub(crate) fn wants_ahead(&mut self) -> bool {
        let pauses = self.pause > 0;
        self.pause = self.pause.saturating_sub(1);
        self.hands_over == HandsOver::Ahead && !pauses
    }

    /// Pauses speculative updates for the next steps, because the last ones went unused.
    pub(crate) fn pause_ahead(&mut self) {
        self.pause = PAUSE;
    }

    /// Ends speculative updates in the step under way.
    pub(crate) fn end_ahead(&mut self) {
        self.handing = None;
    }

    /// Sets the optimizer's learning rate, already checked, when its update is done; returns false if no
    /// update is under way.
    pub(crate) fn give_rate(&mut self, rate: f64) -> bool {
        self.update.as_mut().is_some_and(|update| update.give(UpdateTask::Rate(rate)))
    }

    /// Gives the optimizer the gradients of these stages, whose parameters are on the host.
    pub(crate) fn give_gradients(&mut self, of: impl Fn(usize) -> bool) {
        let updates_in_backward = self.updates_in_backward();
        let (Some(handing), Some(update)) = (&mut self.handing, &mut self.update) else { return };
        for (at, gradients) in std::mem::take(&mut handing.waiting) {
            if of(at) {
                handing.given += 1;
                update.give(match updates_in_backward {
                    true => UpdateTask::InBackward(gradients),
                    false => UpdateTask::LookAhead(gradients),
                });
            } else {
                handing.waiting.push((at, gradients));
            }
        }
    }

    /// Returns whether the optimizer updates parameters in the backward under way.
    pub(crate) fn updates_in_backward(&self) -> bool {
        self.handing.is_some() && self.hands_over == HandsOver::InBackward
    }

    /// Returns whether the backward under way has, or had, gradients for the optimizer.
    pub(crate) fn has_handed(&self) -> bool {
        self.handing.as_ref().is_some_and(|handing| handing.given + handing.waiting.len() > 0)
    }

    /// Number of stages whose gradients cannot be read, because the optimizer updates them in the backward.
    pub(crate) fn without_gradients(&self) -> usize {
        let trained = self.stages.iter().flatten().filter(|stage| stage.is_trained());
        trained.filter(|_| self.hands_over == HandsOver::InBackward).count()
    }

    /// Ends the handing over of gradients; returns the number of stages that the optimizer has updated or
    /// will update.
    pub(crate) fn end_handing(&mut self) -> usize {
        let updates_in_backward = self.updates_in_backward();
        let Some(handing) = self.handing.take().filter(|_| updates_in_backward) else { return 0 };
        if let Some(update) = &mut self.update {
            update.close();
        }
        handing.given
    }

    /// Starts to copy a stage's summed gradients to the host. Frees those of the stage before it: the
    /// device holds the gradients of two stages at most.
    pub(crate) fn send_gradients(
        &mut self,
        at: usize,
        accumulator: &mut Accumulator,
        one: Transfer,
        clock: &mut TransferClock,
    ) -> Result<()> {
        self.forget_left(clock)?;
        let updates_in_backward = self.updates_in_backward();
        let Some(stage) = &mut self.stages[at] else { return Ok(()) };
        let wanted: Vec<bool> = self.places.iter().map(|place| stage.has(*place)).collect();
        let sums = accumulator.take(&wanted);
        let computed = Event::after(Stream::current(self.memory.device)?)?;
        self.outward.outward.wait(&computed)?;
        let on_host = {
            let _outward = self.outward.outward.enter()?;
            let mut bring = |sum| stage.copy_to_host(sum, &self.places, &self.memory);
            let bytes =
                |on_host: &Vec<Sum>| on_host.iter().flatten().flatten().map(tensor_bytes).sum();
            clock.transfer(one, || sums.iter().map(&mut bring).collect(), bytes)?
        };
        let handing = self.handing.as_mut();
        if let Some(handing) = handing.filter(|_| updates_in_backward || at != FIRST_PART) {
            let own = stage.named(&on_host, &self.places, &mut handing.shared);
            let arrived = Event::after(self.outward.outward)?;
            handing.waiting.push((at, StageGradients { of: own, arrived }));
        }
        if !updates_in_backward {
            self.on_host.push(on_host);
        }
        self.in_flight = Some((sums, Event::after(self.outward.outward)?));
        Ok(())
    }

    /// Waits until all gradients are on the host, and adds them to the step's sums.
    pub(crate) fn finish(&mut self, accumulator: &mut Accumulator) -> Result<()> {
        if let Some((_, arrived)) = self.in_flight.take() {
            arrived.synchronize()?;
        }
        // The first stages' first: a tied parameter's gradients are then added up at its owner, and other
        // stages' gradients stay the tensors that speculative updates were computed from.
        self.on_host.drain(..).rev().try_for_each(|on_host| accumulator.add_offloaded(on_host))
    }

    /// Returns the stage and arena of an offloaded variable, for the optimizer.
    pub(crate) fn offload_of(&self, name: &str) -> Option<OffloadedParameter> {
        let mut stages = self.stages.iter().enumerate();
        let part = stages.find_map(|(at, stage)| stage.as_ref()?.owns(name).then_some(at))?;
        Some(OffloadedParameter { part, arena: self.memory.arena.clone() })
    }

    /// Starts the update of offloaded stages that the optimizer has prepared, on a thread of its own.
    pub(crate) fn update(
        &mut self,
        here: &mut Option<Optimizer>,
        plan: OptimizerPlan,
    ) -> Result<()> {
        let Some(optimizer) = here.take() else { return Ok(()) };
        let looks_ahead = self.hands_over == HandsOver::Ahead && self.pause == 0;
        let then = if looks_ahead { HandsOver::Ahead } else { HandsOver::AtTheStep };
        let Err(refused) = self.start_update(optimizer, Some(plan), then) else { return Ok(()) };
        let NotStarted { mut optimizer, plan, error } = *refused;
        // Other stages and devices have already made the step.
        tracing::warn!("{error}: stages on the host are updated while others wait");
        let done = plan.map_or(Ok(()), |plan| optimizer.commit(plan));
        *here = Some(optimizer);
        done
    }

    fn start_update(
        &mut self,
        optimizer: Optimizer,
        plan: Option<OptimizerPlan>,
        then: HandsOver,
    ) -> Result<(), Box<NotStarted>> {
        let threads = match self.memory.device {
            Device::Cpu => threads(),
            // Leaves one thread for the launches on the accelerator.
            _ => threads().saturating_sub(1).max(1),
        };
        let thread = thread::Builder::new().name("brimful update".to_owned());
        self.update = Some(Update::start(thread, optimizer, plan, then, threads)?);
        Ok(())
    }

    /// Waits for the update under way, if any, and returns the optimizer.
    pub(crate) fn finish_update(&mut self) -> Option<(Optimizer, Result<()>)> {
        self.handing = None;
        self.update.take().map(Update::finish)
    }

    /// Transfers every parameter to the host, whatever was under way.
    pub(crate) fn offload_all(&mut self) -> Result<()> {
        self.late.clear();
        self.device_buffers.leave_all(&self.stages)
    }

    /// Drops the gradients that a failed step left.
    pub(crate) fn forget(&mut self, clock: &mut TransferClock) -> Result<()> {
        self.on_host.clear();
        self.forget_left(clock)
    }

    /// Lets work that comes after the gradients' copy reuse their device memory.
    fn forget_left(&mut self, clock: &mut TransferClock) -> Result<()> {
        let device = self.memory.device;
        if let Some((_, arrived)) = self.in_flight.take()
            && device != Device::Cpu
        {
            clock.waiting(Awaited::GradientMemory, || {
                Ok(Stream::current(device)?.wait(&arrived)?)
            })?;
        }
        Ok(())
    }
}
