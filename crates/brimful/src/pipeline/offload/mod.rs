//! Offloads stages to host memory: weights come to the device when they are needed, gradients go to the host when
//! they are complete, and the optimizer's state comes to the device for each update of the weights.
//!
//! ```text
//!   host      weights ──┐            state · gradients ──┐        ┌──▶ weights · state
//!             one host buffer a stage each               │        │
//!   device    buffer 0 │ buffer 1 ── compute     buffer 0 │ buffer 1 ── update
//!             filled by a stream of their own    filled by a stream of their own
//! ```
//!
//! After a step, an update waits until its stage's weights are fetched the next time: gradients and state come
//! with them, and the new weights and state go back while the stage computes. With updates in the backward, only
//! the state is fetched: a stage is updated as soon as its gradients are complete, while they are still on the
//! device.
//!
//! Layers, optimizer and files use the same tensor for a parameter, and the same tensors for its optimizer state.
//! The storage of such a tensor is in a host buffer, or in a device buffer while the device uses the tensor. So a
//! step uses an offloaded parameter like any other. Between steps, and after a failed step, every offloaded tensor
//! is on the host.
//!
//! A step begins with the stages with which the previous step ended. So the previous step leaves copies of them in
//! the device buffers: the weights of its last stage and, if updates wait, the optimizer state of its last stages,
//! as many as there are buffers. A copy is fetched again if its tensors have changed on the host meanwhile.

mod device_buffers;
mod speed;
mod stage;

pub use speed::measure_host_link;
pub(crate) use stage::{HostMemory, OffloadedStage};

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use brimful_torch::foreach;
use brimful_torch::stream::{Event, Stream};
use tch::{Kind, Tensor};

use crate::Result;
use crate::accumulate::{Accumulator, Sum};
use crate::batch::{Versions, tensor_bytes};
use crate::pipeline::transfers::{HostStaging, TransferClock};
use crate::update::{OffloadedParameter, OptimizerPart, OptimizerPlan};
use brimful_plan::schedule::{Awaited, StageId, Transfer, TransferKind};
use device_buffers::DeviceBuffers;

/// Default number of device buffers: one stage computes while the next one's weights arrive.
pub(crate) const DEVICE_BUFFERS: usize = 2;

/// Settings of offloaded stages.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OffloadSettings {
    /// Number of the device's buffers for offloaded stages.
    pub(crate) device_buffers: usize,
    /// Dtype that f32 gradients are rounded to on the host; none keeps f32.
    pub(crate) gradient_kind: Option<Kind>,
    pub(crate) updates_in_backward: bool,
}

impl Default for OffloadSettings {
    fn default() -> Self {
        Self { device_buffers: DEVICE_BUFFERS, gradient_kind: None, updates_in_backward: false }
    }
}

/// Facts about a fetched stage's work until its weights are released.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Visit {
    /// Whether the work completes the stage's gradients.
    pub(crate) completes: bool,
    /// Whether the stage is among the step's last stages, as many as there are buffers.
    pub(crate) ends_step: bool,
}

/// Offloaded stages of a worker.
#[derive(Debug)]
pub(crate) struct OffloadedStages {
    memory: HostMemory,
    /// By place among the worker's stages; none for stages that stay on the device.
    stages: Vec<Option<OffloadedStage>>,
    weights: DeviceBuffers,
    /// Buffers for optimizer state and gradients of stages that are updated.
    states: DeviceBuffers,
    /// Stage whose parameters point to its device buffer.
    current: Option<usize>,
    /// Stage whose weights the previous step left in a device buffer, and the versions that the weights had then.
    weights_left: Option<(usize, Versions)>,
    /// Stages whose optimizer state the previous step left in device buffers, and the versions that the state had
    /// then.
    states_left: BTreeMap<usize, Versions>,
    /// Device-to-host staging for gradients and boundaries.
    pub(crate) outward: HostStaging,
    /// Stream that copies updated stages to the host. Boundaries have a different stream, because they are needed
    /// sooner.
    homeward: Stream,
    /// Host address of each parameter of the step under way.
    places: Vec<usize>,
    /// Gradients that are being copied to the host, and the event at which they have arrived.
    in_flight: Option<(Vec<Sum>, Event)>,
    /// Gradients on the host, arrived or in flight, by stage in the order in which they were sent, then by group
    /// of loss terms.
    on_host: Vec<Vec<Sum>>,
    /// Dtype that f32 gradients are rounded to on the host; none keeps f32.
    gradient_kind: Option<Kind>,
    /// Updates that wait for the next fetch of their stage.
    waiting: BTreeMap<usize, OptimizerPlan>,
    /// Whether stages are updated in the backward.
    pub(crate) in_backward: bool,
    /// Updates of the backward under way.
    updates: Option<BackwardUpdates>,
    /// Whether copies of updated stages to the host may still be under way.
    is_homeward: bool,
}

/// Updates of stages in one backward.
#[derive(Debug, Default)]
struct BackwardUpdates {
    /// Gradients of tied parameters, complete once the owning stage has run.
    shared: Vec<(String, Tensor)>,
    /// Names and places of the parameters on the device that are updated after each stage's last backward.
    resident: HashMap<usize, Vec<(String, usize)>>,
    /// Number of stages that were updated.
    done: usize,
}

impl OffloadedStages {
    /// Makes the device buffers; returns none if every stage stays on the device.
    pub(crate) fn new(
        stages: Vec<Option<OffloadedStage>>,
        memory: HostMemory,
        settings: OffloadSettings,
    ) -> Result<Option<Self>> {
        let Some(largest) = stages.iter().flatten().map(|stage| stage.buffer_bytes).max() else {
            return Ok(None);
        };
        let device_buffers = settings.device_buffers.min(stages.iter().flatten().count());
        Ok(Some(Self {
            weights: DeviceBuffers::new(memory.device, device_buffers, largest)?,
            states: DeviceBuffers::new(memory.device, device_buffers, 1)?,
            current: None,
            weights_left: None,
            states_left: BTreeMap::new(),
            outward: HostStaging::new(memory.device, memory.arena.clone())?,
            homeward: Stream::new(memory.device)?,
            places: Vec::new(),
            in_flight: None,
            on_host: Vec::new(),
            gradient_kind: settings.gradient_kind,
            waiting: BTreeMap::new(),
            in_backward: settings.updates_in_backward,
            updates: None,
            is_homeward: false,
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
        let users = self.stages.iter().enumerate();
        users.flat_map(|(user, _)| self.owners(user).map(move |owner| (owner, user)))
    }

    /// Returns the places of the stages that own trained parameters which the stage `user` shares.
    fn owners(&self, user: usize) -> impl Iterator<Item = usize> {
        let guests = self.stages[user].iter().flat_map(OffloadedStage::trained_guests);
        guests.filter_map(|name| {
            let is_owner = |stage: &Option<OffloadedStage>| {
                stage.as_ref().is_some_and(|stage| stage.owns(name))
            };
            self.stages.iter().position(is_owner)
        })
    }

    /// Returns the number of offloaded stages.
    pub(crate) fn count(&self) -> usize {
        self.stages.iter().flatten().count()
    }

    /// Returns the number of device buffers.
    pub(crate) fn device_buffers(&self) -> usize {
        self.weights.count
    }

    /// Begins a step that sums the gradients of these parameters; all of them are on the host.
    pub(crate) fn begin(&mut self, parameters: &[Tensor]) {
        self.places = parameters.iter().map(|p| p.data_ptr() as usize).collect();
        self.on_host.clear();
    }

    /// Makes the optimizer's state on the host, and device buffers for the state. The device buffers have space
    /// for gradients too, unless stages are updated in the backward. All parameters must be on the host.
    pub(crate) fn reserve_updates(&mut self, optimizer: &mut OptimizerPart) -> Result<()> {
        if optimizer.parameters().next().is_none() {
            // Only the first replica's optimizer has parameters.
            return Ok(());
        }
        let lacks = |(at, stage): (usize, &Option<OffloadedStage>)| {
            stage.as_ref().is_some_and(|stage| !stage.has_state(at, optimizer))
        };
        if self.stages.iter().enumerate().any(lacks) {
            self.drop_states_left()?;
        }
        let mut largest = 0;
        for (at, stage) in self.stages.iter_mut().enumerate() {
            let Some(stage) = stage else { continue };
            stage.hold_state(at, optimizer, &self.memory)?;
            let gradients =
                if self.in_backward { 0 } else { stage.gradient_bytes(self.gradient_kind) };
            largest = largest.max(stage.state_bytes() + gradients);
        }
        self.reserve_states(largest)
    }

    fn reserve_states(&mut self, bytes: usize) -> Result<()> {
        if bytes > self.states.bytes {
            self.drop_states_left()?;
        }
        self.states.reserve(bytes)
    }

    /// Starts to fetch a stage's weights into a device buffer while the stage before it computes. Also fetches the
    /// stage's optimizer state if an update waits, if this `visit` ends with an update, or to leave the state in a
    /// buffer for the next step.
    pub(crate) fn fetch(
        &mut self,
        at: usize,
        one: Transfer,
        visit: Visit,
        clock: &mut TransferClock,
    ) -> Result<()> {
        // The waiting update of an owner changes a parameter that this stage shares, so `enter` fetches this stage
        // after the update.
        if self.owners(at).any(|owner| self.waiting.contains_key(&owner)) {
            return Ok(());
        }
        self.bring(at, one, clock)?;
        let updates = self.waiting.contains_key(&at) || visit.completes && self.updates.is_some();
        let is_left = visit.completes && visit.ends_step && self.updates.is_none();
        let is_left = is_left && self.state_fits(at) && !self.states.has(at);
        // If no buffer is free, the update itself fetches the state.
        if updates && (self.states_left.contains_key(&at) || self.states.can_fill_ahead()) {
            self.bring_state(at, one, clock)?;
        } else if is_left && self.states.can_fill_ahead() {
            self.bring_state(at, one, clock)?;
            let versions = self.stages[at].as_ref().map(OffloadedStage::state_versions);
            self.states_left.extend(versions.map(|versions| (at, versions)));
        }
        Ok(())
    }

    /// Returns whether the device buffers are large enough for the stage's state.
    fn state_fits(&self, at: usize) -> bool {
        self.stages[at].as_ref().is_some_and(|stage| stage.state_bytes() <= self.states.bytes)
    }

    /// Fetches a stage's weights, unless the previous step left them in a buffer.
    fn bring(&mut self, at: usize, one: Transfer, clock: &mut TransferClock) -> Result<()> {
        if let Some((left, versions)) = self.weights_left.take() {
            let stage = self.stages[at].as_ref().filter(|_| left == at);
            if stage.is_some_and(|stage| !stage.has_changed(&versions)) {
                return Ok(());
            }
            self.release_weights(left)?;
        }
        let Some(stage) = &self.stages[at] else { return Ok(()) };
        let owners = self.owners(at).filter_map(|owner| self.stages[owner].as_ref());
        let updated: Vec<Arc<Event>> =
            owners.chain([stage]).filter_map(|stage| stage.updated_weights.clone()).collect();
        self.weights.fill(at, |inward, buffer| {
            updated.iter().try_for_each(|updated| inward.wait(updated))?;
            clock.transfer(one, || stage.copy_to(buffer), |()| stage.fetched_bytes())
        })
    }

    /// Fetches a stage's optimizer state, unless the previous step left it in a buffer, and the gradients of a
    /// waiting update.
    fn bring_state(&mut self, at: usize, one: Transfer, clock: &mut TransferClock) -> Result<()> {
        if !self.states_left.contains_key(&at) && !self.states.is_free() {
            self.drop_states_left()?;
        }
        let Some(stage) = &self.stages[at] else { return Ok(()) };
        let gradients = self.waiting.get(&at).map(OptimizerPlan::gradients).unwrap_or_default();
        let one = Transfer { kind: TransferKind::FetchState, ..one };
        if let Some(versions) = self.states_left.remove(&at) {
            if !stage.has_changed_state(&versions) {
                return self.states.add(at, |buffer| {
                    let copy = || stage.copy_gradients_to(buffer, &gradients);
                    clock.transfer(one, copy, |bytes| *bytes).map(drop)
                });
            }
            self.states.release(at, None)?;
        }
        self.states.fill(at, |inward, buffer| {
            stage.updated_state.iter().try_for_each(|updated| inward.wait(updated))?;
            let copy = || {
                let state = stage.copy_state_to(buffer)?;
                Ok(state + stage.copy_gradients_to(buffer, &gradients)?)
            };
            clock.transfer(one, copy, |bytes| *bytes).map(drop)
        })
    }

    /// Frees the buffers of optimizer state that the previous step left. First waits for the copies into them,
    /// because the caller may free the host memory from which they copy.
    fn drop_states_left(&mut self) -> Result<()> {
        if !self.states_left.is_empty() {
            self.states.synchronize()?;
        }
        let left = std::mem::take(&mut self.states_left);
        left.into_keys().try_for_each(|at| self.states.release(at, None))
    }

    /// Points a stage's parameters to its device buffer, makes this thread's work wait for the weights, and
    /// updates them if an update waits. Before that, fetches the weights, as the transfer `one`, if no buffer
    /// holds them.
    pub(crate) fn enter(
        &mut self,
        at: usize,
        one: Transfer,
        optimizer: Option<&mut OptimizerPart>,
        clock: &mut TransferClock,
    ) -> Result<()> {
        if self.stages[at].is_none() || self.current == Some(at) {
            return Ok(());
        }
        // Either the fetch is late, or the list of transfers was interrupted: a loss on all outputs sends
        // every stage to the host between forward and backward. In both cases a buffer is free, because
        // fewer stages are on the device than the list assumes, and the list never needs more buffers than
        // there are.
        let mut optimizer = optimizer;
        let is_left = self.weights_left.as_ref().is_some_and(|(left, _)| *left == at);
        if is_left || !self.weights.has(at) {
            let owners: Vec<usize> = self.owners(at).collect();
            for owner in owners.into_iter().filter(|owner| *owner != at) {
                self.finish_one(owner, one, optimizer.as_deref_mut(), clock)?;
            }
            self.bring(at, one, clock)?;
        }
        let buffer = clock.waiting(Awaited::Weights, || self.weights.wait(at))?;
        let Some(stage) = &self.stages[at] else { return Ok(()) };
        stage.point_to(&buffer)?;
        self.current = Some(at);
        match (self.waiting.contains_key(&at), optimizer) {
            (true, Some(optimizer)) => self.update_waiting(at, one, optimizer, clock),
            _ => Ok(()),
        }
    }

    /// Applies the waiting update of this stage, which is on the device.
    fn update_waiting(
        &mut self,
        at: usize,
        one: Transfer,
        optimizer: &mut OptimizerPart,
        clock: &mut TransferClock,
    ) -> Result<()> {
        let Some(plan) = self.waiting.get(&at) else { return Ok(()) };
        let on_host = plan.gradients();
        self.update(at, one, clock, |this, buffer| {
            let Some(mut plan) = this.waiting.remove(&at) else { return Ok(()) };
            let stepped = this.gradients_in(at, buffer, &on_host).and_then(|gradients| {
                plan.set_gradients(gradients);
                optimizer.commit(&mut plan)
            });
            if stepped.is_err() {
                // The host still has the old weights and state, so the update can be retried.
                plan.set_gradients(on_host);
                this.waiting.insert(at, plan);
            }
            stepped
        })
    }

    /// Returns the places of these gradients of the stage in a device buffer.
    fn gradients_in(&self, at: usize, buffer: &Tensor, on_host: &[Tensor]) -> Result<Vec<Tensor>> {
        let stage = self.stages[at].as_ref();
        stage.map_or(Ok(Vec::new()), |stage| stage.gradients_in(buffer, on_host))
    }

    /// Points the stage's optimizer state to a device buffer for `step`, and sends the updated stage to the host.
    fn update(
        &mut self,
        at: usize,
        one: Transfer,
        clock: &mut TransferClock,
        step: impl FnOnce(&mut Self, &Tensor) -> Result<()>,
    ) -> Result<()> {
        if self.states_left.contains_key(&at) || !self.states.has(at) {
            self.bring_state(at, one, clock)?;
        }
        let buffer = clock.waiting(Awaited::Update, || self.states.wait(at))?;
        let point_to = |this: &Self, buffer: Option<&Tensor>| {
            this.stages[at].as_ref().map_or(Ok(()), |stage| stage.point_state_to(buffer))
        };
        let stepped = point_to(self, Some(&buffer)).and_then(|()| step(self, &buffer));
        let sent = match &stepped {
            Ok(()) => self.send_update(at, &buffer, one, clock),
            Err(_) => Ok(()),
        };
        let back = point_to(self, None);
        let updated = self.stages[at].as_ref().and_then(|stage| stage.updated_state.clone());
        let released = self.states.release(at, updated);
        stepped.and(sent).and(back).and(released)
    }

    fn send_update(
        &mut self,
        at: usize,
        state: &Tensor,
        one: Transfer,
        clock: &mut TransferClock,
    ) -> Result<()> {
        let (Some(stage), Some(weights)) = (&mut self.stages[at], self.weights.of(at)) else {
            return Ok(());
        };
        let stream = self.homeward;
        stream.wait(&Event::after(Stream::current(self.memory.device)?)?)?;
        let _outward = stream.enter()?;
        let one = Transfer { kind: TransferKind::OffloadState, ..one };
        let copy = || {
            // The next forward needs the weights first.
            let weights = stage.copy_from(weights)?;
            stage.updated_weights = Some(Arc::new(Event::after(stream)?));
            Ok(weights + stage.copy_state_from(state)?)
        };
        clock.transfer(one, copy, |bytes| *bytes)?;
        stage.updated_state = Some(Arc::new(Event::after(stream)?));
        self.is_homeward = true;
        Ok(())
    }

    /// Returns the number of the fetch that brought a stage's weights to the device; none if the stage is
    /// not in a device buffer.
    pub(crate) fn generation(&self, at: usize) -> Option<u64> {
        self.weights.generation(at)
    }

    /// Frees a stage's device buffers, once its update has reached the host. Optimizer state that is left for the
    /// next step stays in its buffer.
    pub(crate) fn release(&mut self, at: usize) -> Result<()> {
        self.point_to_host(at)?;
        self.release_weights(at)
    }

    /// Ends the step with this stage. Leaves its weights in their buffer, because the next step begins with this
    /// stage.
    pub(crate) fn release_last(&mut self, at: usize) -> Result<()> {
        self.point_to_host(at)?;
        match self.stages[at].as_ref().filter(|stage| stage.is_alone() && self.weights.has(at)) {
            Some(stage) => self.weights_left = Some((at, stage.versions())),
            None => self.release_weights(at)?,
        }
        Ok(())
    }

    /// Points a stage's parameters back to the host, and frees the buffer of its state, unless the state is left
    /// for the next step.
    fn point_to_host(&mut self, at: usize) -> Result<()> {
        let (Some(stage), Some(buffer)) = (&self.stages[at], self.weights.of(at)) else {
            return Ok(());
        };
        stage.leave(buffer)?;
        self.current = self.current.filter(|current| *current != at);
        match self.states_left.contains_key(&at) {
            true => Ok(()),
            false => self.states.release(at, stage.updated_state.clone()),
        }
    }

    fn release_weights(&mut self, at: usize) -> Result<()> {
        let updated = self.stages[at].as_ref().and_then(|stage| stage.updated_weights.clone());
        self.weights.release(at, updated)
    }

    /// Makes the device buffers for state large enough for these updates of stages.
    pub(crate) fn reserve_for(&mut self, plans: &BTreeMap<usize, OptimizerPlan>) -> Result<()> {
        let bytes = plans.iter().filter_map(|(at, plan)| {
            Some(self.stages[*at].as_ref()?.state_bytes_with(&plan.gradients()))
        });
        let bytes = bytes.max().unwrap_or(0);
        self.reserve_states(bytes)
    }

    /// Keeps prepared updates of stages until the stages' weights are fetched.
    pub(crate) fn put_off(&mut self, plans: BTreeMap<usize, OptimizerPlan>) {
        self.waiting = plans;
    }

    /// Applies the waiting updates, and waits until all updated stages are on the host.
    pub(crate) fn finish_updates(
        &mut self,
        mut optimizer: Option<&mut OptimizerPart>,
    ) -> Result<()> {
        let mut clock = TransferClock::new(self.memory.device, false);
        while let Some((&at, _)) = self.waiting.first_key_value() {
            let (kind, stage) = (TransferKind::Fetch, StageId::at(at));
            let one = Transfer { kind, stage, micro_batch: None, before: 0 };
            self.finish_one(at, one, optimizer.as_deref_mut(), &mut clock)?;
        }
        if std::mem::take(&mut self.is_homeward) {
            self.homeward.synchronize()?;
        }
        Ok(())
    }

    fn finish_one(
        &mut self,
        at: usize,
        one: Transfer,
        optimizer: Option<&mut OptimizerPart>,
        clock: &mut TransferClock,
    ) -> Result<()> {
        if !self.waiting.contains_key(&at) {
            return Ok(());
        }
        let current = self.current;
        let done = self.fetch(at, one, Visit::default(), clock);
        let done = done.and_then(|()| self.enter(at, one, optimizer, clock));
        let left = self.release(at);
        self.current = current;
        done.and(left)
    }

    /// Begins updates in the backward; `resident` has the names and places of the parameters on the device
    /// that are updated after each stage's last backward.
    pub(crate) fn begin_updates(&mut self, resident: HashMap<usize, Vec<(String, usize)>>) {
        self.updates = Some(BackwardUpdates { resident, ..BackwardUpdates::default() });
    }

    /// Returns whether parameters on the device are updated after this stage's last backward.
    pub(crate) fn updates_resident(&self, at: usize) -> bool {
        self.updates.as_ref().is_some_and(|updates| updates.resident.contains_key(&at))
    }

    /// Updates the parameters on the device whose gradients are complete with this stage's last backward.
    pub(crate) fn update_resident(
        &mut self,
        at: usize,
        accumulator: &mut Accumulator,
        optimizer: Option<&mut OptimizerPart>,
    ) -> Result<()> {
        let resident = self.updates.as_mut().and_then(|updates| updates.resident.remove(&at));
        let (Some(resident), Some(optimizer)) = (resident, optimizer) else { return Ok(()) };
        let mut wanted = vec![false; self.places.len()];
        resident.iter().for_each(|(_, place)| wanted[*place] = true);
        let mut sums = accumulator.take(&wanted);
        let parts = resident.into_iter().map(|(name, place)| {
            let parts = sums.iter_mut().filter_map(|sum| sum[place].take()).collect::<Vec<_>>();
            (name, parts)
        });
        let gradients = added_up(parts.filter(|(_, parts)| !parts.is_empty()).collect())?;
        if gradients.is_empty() {
            return Ok(());
        }
        let mut plan = optimizer.prepare_with(&gradients)?;
        self.count_update();
        optimizer.commit(&mut plan)
    }

    fn count_update(&mut self) {
        if let Some(updates) = &mut self.updates {
            updates.done += 1;
        }
    }

    /// Returns whether the optimizer updates parameters in the backward under way.
    pub(crate) fn updates_in_backward(&self) -> bool {
        self.updates.is_some()
    }

    /// Returns the number of stages that were updated in the backward under way.
    pub(crate) fn updated_stages(&self) -> usize {
        self.updates.as_ref().map_or(0, |updates| updates.done)
    }

    /// Returns the number of stages whose gradients cannot be read, because the optimizer updates them in the
    /// backward.
    pub(crate) fn without_gradients(&self) -> usize {
        if self.in_backward { self.stages.len() } else { 0 }
    }

    /// Ends the updates in the backward; returns the number of stages that were updated.
    pub(crate) fn end_updates(&mut self) -> usize {
        self.updates.take().map_or(0, |updates| updates.done)
    }

    /// Takes the gradients of a stage, which are complete: updates the stage by them, or starts to copy them to the
    /// host.
    pub(crate) fn take_gradients(
        &mut self,
        at: usize,
        accumulator: &mut Accumulator,
        one: Transfer,
        optimizer: Option<&mut OptimizerPart>,
        clock: &mut TransferClock,
    ) -> Result<()> {
        let Some(stage) = &self.stages[at] else { return Ok(()) };
        let wanted: Vec<bool> = self.places.iter().map(|place| stage.has(*place)).collect();
        let sums = accumulator.take(&wanted);
        match (&mut self.updates, optimizer) {
            (Some(updates), Some(optimizer)) => {
                let gradients = stage.named(&sums, &self.places, &mut updates.shared);
                self.update_in_backward(at, gradients, one, optimizer, clock)
            }
            _ => self.send_gradients(at, sums, one, clock),
        }
    }

    /// Updates a stage by its gradients on the device. Each gradient is the sum of its parts.
    fn update_in_backward(
        &mut self,
        at: usize,
        gradients: Vec<(String, Vec<Tensor>)>,
        one: Transfer,
        optimizer: &mut OptimizerPart,
        clock: &mut TransferClock,
    ) -> Result<()> {
        let gradients = added_up(gradients)?;
        if gradients.is_empty() {
            return Ok(());
        }
        self.update(at, one, clock, |this, _| {
            let mut plan = optimizer.prepare_with(&gradients)?;
            this.count_update();
            optimizer.commit(&mut plan)
        })
    }

    /// Starts to copy a stage's summed gradients to the host. Frees the device memory of the gradients that were
    /// sent before: the device holds the gradients of two stages at most.
    fn send_gradients(
        &mut self,
        at: usize,
        sums: Vec<Sum>,
        one: Transfer,
        clock: &mut TransferClock,
    ) -> Result<()> {
        self.forget_left(clock)?;
        let kind = self.gradient_kind;
        let rounded = |sum: Tensor| match kind.filter(|_| sum.kind() == Kind::Float) {
            Some(kind) => Ok(sum.f_to_kind(kind)?),
            None => Ok(sum),
        };
        let rounded = |sum: Sum| sum.into_iter().map(|sum| sum.map(rounded).transpose()).collect();
        let sums: Vec<Sum> = sums.into_iter().map(rounded).collect::<Result<_>>()?;
        let Some(stage) = &mut self.stages[at] else { return Ok(()) };
        let computed = Event::after(Stream::current(self.memory.device)?)?;
        self.outward.outward.wait(&computed)?;
        let on_host = {
            let _outward = self.outward.outward.enter()?;
            let mut bring = |sum| stage.copy_to_host(sum, &self.places, &self.memory);
            let bytes =
                |on_host: &Vec<Sum>| on_host.iter().flatten().flatten().map(tensor_bytes).sum();
            clock.transfer(one, || sums.iter().map(&mut bring).collect(), bytes)?
        };
        self.on_host.push(on_host);
        self.in_flight = Some((sums, Event::after(self.outward.outward)?));
        Ok(())
    }

    /// Waits until all gradients are on the host, and adds them to the step's sums.
    pub(crate) fn finish(&mut self, accumulator: &mut Accumulator) -> Result<()> {
        if let Some((_, arrived)) = self.in_flight.take() {
            arrived.synchronize()?;
        }
        // The first stages come first, so that a tied parameter's gradients are added up at its owner.
        self.on_host.drain(..).rev().try_for_each(|on_host| accumulator.add_offloaded(on_host))
    }

    /// Drops the state of an optimizer that is replaced.
    pub(crate) fn forget_states(&mut self) {
        self.stages.iter_mut().flatten().for_each(OffloadedStage::forget_state);
    }

    /// Returns the stage, device and arena of an offloaded variable, for the optimizer.
    pub(crate) fn offload_of(&self, name: &str) -> Option<OffloadedParameter> {
        let mut stages = self.stages.iter().enumerate();
        let part = stages.find_map(|(at, stage)| stage.as_ref()?.owns(name).then_some(at))?;
        let (device, arena) = (self.memory.device, self.memory.arena.clone());
        Some(OffloadedParameter { part, device, arena })
    }

    /// Points every parameter back to the host and frees the device buffers, except those that are left for the
    /// next step.
    pub(crate) fn end_step(&mut self) -> Result<()> {
        let left = self.weights_left.as_ref().map(|(at, _)| *at);
        let held = self.weights.held().into_iter().filter(|at| Some(*at) != left);
        held.collect::<Vec<_>>().into_iter().try_for_each(|at| self.release(at))
    }

    /// Points every parameter back to the host and frees the device buffers, whatever was under way.
    pub(crate) fn offload_all(&mut self) -> Result<()> {
        self.weights_left = None;
        self.drop_states_left()?;
        self.end_step()
    }

    /// Drops the gradients that a failed step left.
    pub(crate) fn forget(&mut self, clock: &mut TransferClock) -> Result<()> {
        self.on_host.clear();
        self.forget_left(clock)
    }

    /// Makes this thread's later work wait for the gradients' copy to the host, and frees their device memory.
    fn forget_left(&mut self, clock: &mut TransferClock) -> Result<()> {
        let device = self.memory.device;
        let Some((_, arrived)) = self.in_flight.take() else { return Ok(()) };
        clock.waiting(Awaited::GradientMemory, || Ok(Stream::current(device)?.wait(&arrived)?))
    }
}

/// Adds up the parts of each gradient.
fn added_up(gradients: Vec<(String, Vec<Tensor>)>) -> Result<Vec<(String, Tensor)>> {
    let added = gradients.into_iter().map(|(name, mut parts)| {
        let sum = parts.swap_remove(0);
        for part in parts {
            foreach::add(&[sum.shallow_clone()], &[part], 1.0)?;
        }
        Ok((name, sum))
    });
    added.collect()
}

impl Drop for OffloadedStages {
    fn drop(&mut self) {
        // Host memory must not be unpinned while copies of it are under way. Errors are ignored, because a
        // device that has failed copies nothing.
        let inward = self.weights.synchronize().and(self.states.synchronize());
        let outward = self.outward.outward.synchronize().and(self.homeward.synchronize());
        let _ = (inward, outward);
    }
}
