//! Stages that live in the host's memory: their weights come to the device when they are needed, their
//! gradients go home when they are whole, and the optimizer works on them there.
//!
//! ```text
//!   host      weights ──┐             ┌──▶ gradients ── optimizer ──▶ weights
//!             one slab a stage        │    a slab a stage     a thread of its own
//!                     inward stream   outward stream
//!   device    slot 0 │ slot 1 ── compute ──▶ sums of one stage
//! ```
//!
//! A parameter is one tensor for all who know it. At home its numbers are the slab's; while its stage
//! is at work they are the slot's, and all that a step does with it is as on a device. Between steps,
//! and after one that failed, every parameter is at home.

mod hosted;
mod slots;
mod speed;
mod update;

pub(crate) use hosted::{HomeMemory, HostedStage};
pub use speed::HostSpeed;
use update::{HomeTask, NotStarted, StageGradients, Update};

use std::thread;

use brimful_torch::stream::{Event, Stream};
use brimful_torch::threads::threads;
use tch::{Device, Tensor};

use crate::Result;
use crate::accumulate::{Accumulator, Sum};
use crate::batch::tensor_bytes;
use crate::optim::{FIRST_PART, Optimizer, OptimizerPlan, ParameterHome};
use crate::pipeline::run::{MoveClock, RestingPlace};
use crate::schedule::{Awaited, Move};
use slots::Slots;

/// How many stages are in slots at a time, unless a plan says it: one computes while the next is on its
/// way.
pub(crate) const SLOTS: usize = 2;

/// A worker's stages that live on the host.
#[derive(Debug)]
pub(crate) struct HostedStages {
    memory: HomeMemory,
    /// By place among the worker's stages; none for those that live on the device.
    stages: Vec<Option<HostedStage>>,
    slots: Slots,
    /// The stages that wait for their last update before they are brought to a slot.
    late: Vec<(usize, Move)>,
    /// Where gradients and boundaries leave by.
    pub(crate) outward: RestingPlace,
    /// The place at home of each parameter of the step under way.
    places: Vec<usize>,
    /// Sums on their way home, and when they are there.
    leaving: Option<(Vec<Sum>, Event)>,
    /// Sums that have set out, as they are at home, by group of terms.
    home: Vec<Vec<Sum>>,
    /// When the optimizer gets gradients, and what the step under way has for it.
    pub(crate) hands_over: HandsOver,
    handing: Option<Handing>,
    /// For so many steps nothing is computed ahead, because nobody took the last over.
    pause: usize,
    update: Option<Update>,
}

/// 8 steps are taken without looking ahead after one that had no use for it, as with gradients that are clipped.
const PAUSE: usize = 8;

/// When the optimizer at home gets a step's gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HandsOver {
    /// When it is asked for its step.
    AtTheStep,
    /// Stage by stage while the backward goes on, to compute beside the state what the step will come to.
    Ahead,
    /// Stage by stage, to update by them.
    Following,
}

/// Gradients of the backward under way that the optimizer gets before its step.
#[derive(Debug, Default)]
struct Handing {
    /// Of stages whose parameters are still in their slots.
    waiting: Vec<(usize, StageGradients)>,
    /// Of parameters that an earlier stage has too: theirs are whole when its are.
    shared: Vec<(String, Tensor)>,
    /// How many stages were given.
    given: usize,
}

impl HostedStages {
    /// None where every stage lives on its device.
    pub(crate) fn new(
        stages: Vec<Option<HostedStage>>,
        memory: HomeMemory,
        slots: usize,
    ) -> Result<Option<Self>> {
        let Some(largest) = stages.iter().flatten().map(|stage| stage.slot_bytes).max() else {
            return Ok(None);
        };
        let slots = slots.min(stages.iter().flatten().count());
        Ok(Some(Self {
            slots: Slots::new(memory.device, slots, largest)?,
            outward: RestingPlace::new(memory.device, memory.arena.clone())?,
            late: Vec::new(),
            places: Vec::new(),
            leaving: None,
            home: Vec::new(),
            hands_over: HandsOver::AtTheStep,
            handing: None,
            pause: 0,
            update: None,
            memory,
            stages,
        }))
    }

    /// Whether the stage at this place is trained; none of one that lives on the device.
    pub(crate) fn is_trained(&self, at: usize) -> Option<bool> {
        self.stages[at].as_ref().map(HostedStage::is_trained)
    }

    /// The places (owner, user) of stages that share a parameter which is trained.
    pub(crate) fn ties(&self) -> impl Iterator<Item = (usize, usize)> {
        let hosted =
            || self.stages.iter().enumerate().filter_map(|(at, s)| Some((at, s.as_ref()?)));
        let owner = move |name: &str| Some(hosted().find(|(_, stage)| stage.owns(name))?.0);
        hosted().flat_map(move |(user, stage)| {
            stage.trained_guests().filter_map(owner).map(move |owner| (owner, user))
        })
    }

    /// How many live on the host.
    pub(crate) fn count(&self) -> usize {
        self.stages.iter().flatten().count()
    }

    /// How many stages are in slots at a time.
    pub(crate) fn slots(&self) -> usize {
        self.slots.count
    }

    /// A step begins that sums the gradients of these parameters, all at home.
    pub(crate) fn begin(&mut self, parameters: &[Tensor]) {
        self.places = parameters.iter().map(|p| p.data_ptr() as usize).collect();
        self.home.clear();
    }

    /// Starts to bring a stage's weights to a slot, at once or when its last update is done: the stage before
    /// it computes meanwhile.
    pub(crate) fn fetch(&mut self, at: usize, one: Move, clock: &mut MoveClock) -> Result<()> {
        self.late.push((at, one));
        self.fetch_late(clock)
    }

    /// Starts to bring those whose last update is done by now.
    fn fetch_late(&mut self, clock: &mut MoveClock) -> Result<()> {
        let late = std::mem::take(&mut self.late);
        let follows = self.is_following();
        let mut update = self.update.as_mut().filter(|_| !follows);
        let mut is_done = |at| update.as_mut().is_none_or(|update| update.has_done(at));
        let (done, late) = late.into_iter().partition::<Vec<_>, _>(|(at, _)| is_done(*at));
        self.late = late;
        done.into_iter().try_for_each(|(at, one)| self.bring(at, one, clock))
    }

    /// Waits for the stage's last update, and starts to bring its weights to a slot: by the move that is late, or
    /// by this one.
    fn fetch_now(&mut self, at: usize, one: Move, clock: &mut MoveClock) -> Result<()> {
        let late = self.late.iter().position(|(late, _)| *late == at);
        let one = late.map_or(one, |late| self.late.remove(late).1);
        let follows = self.is_following();
        if let Some(update) = self.update.as_mut().filter(|_| !follows) {
            clock.waiting(Awaited::Update, || {
                update.wait_for(at);
                Ok(())
            })?;
        }
        self.bring(at, one, clock)
    }

    fn bring(&mut self, at: usize, one: Move, clock: &mut MoveClock) -> Result<()> {
        let stage = self.stages[at].as_ref();
        stage.map_or(Ok(()), |stage| self.slots.fetch(at, stage, one, clock))
    }

    /// Lets a stage compute: its parameters are what is in its slot, which this move fills where none has.
    pub(crate) fn enter(&mut self, at: usize, one: Move, clock: &mut MoveClock) -> Result<()> {
        self.fetch_late(clock)?;
        if self.stages[at].is_none() || self.slots.is_current(at) {
            return Ok(());
        }
        // It is late. Or its moves were made for a list that was run in one go: one that was left in between, as
        // that of a loss on all outputs is, has sent everything home. A slot is free in both cases: fewer stages are
        // in slots than the moves, which never have more than there are, take for granted.
        if !self.slots.has(at) {
            self.fetch_now(at, one, clock)?;
        }
        let Some(stage) = &self.stages[at] else { return Ok(()) };
        self.slots.enter(at, stage, clock)
    }

    /// Which of all fetches a stage's weights came by, where they are on the device; none of one that lives there.
    pub(crate) fn generation(&self, at: usize) -> Option<u64> {
        self.slots.generation(at)
    }

    /// Gives a stage's slot up.
    pub(crate) fn release(&mut self, at: usize) -> Result<()> {
        self.stages[at].as_ref().map_or(Ok(()), |stage| self.slots.release(at, stage))?;
        self.give_gradients(|stage| stage == at);
        Ok(())
    }

    /// Lets the optimizer follow a step that begins, or look ahead while it goes backward: the one that is here, or
    /// the one whose last update is under way.
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

    /// Whether the optimizer has gradients to look ahead from.
    pub(crate) fn is_looking_ahead(&self) -> bool {
        self.update.as_ref().is_some_and(|update| update.looks_ahead)
    }

    /// Whether the step that begins is to be looked ahead of.
    pub(crate) fn wants_ahead(&mut self) -> bool {
        let pauses = self.pause > 0;
        self.pause = self.pause.saturating_sub(1);
        self.hands_over == HandsOver::Ahead && !pauses
    }

    /// What was computed ahead was of no use: the next steps go without.
    pub(crate) fn pause_ahead(&mut self) {
        self.pause = PAUSE;
    }

    /// Does not look further ahead in the step under way.
    pub(crate) fn end_ahead(&mut self) {
        self.handing = None;
    }

    /// Lets the optimizer take this learning rate, which was checked, when it is done with its update; tells
    /// whether there is such.
    pub(crate) fn give_rate(&mut self, rate: f64) -> bool {
        self.update.as_mut().is_some_and(|update| update.give(HomeTask::Rate(rate)))
    }

    /// Gives the optimizer the gradients of these stages, whose parameters are at home.
    pub(crate) fn give_gradients(&mut self, of: impl Fn(usize) -> bool) {
        let follows = self.is_following();
        let (Some(handing), Some(update)) = (&mut self.handing, &mut self.update) else { return };
        for (at, gradients) in std::mem::take(&mut handing.waiting) {
            if of(at) {
                handing.given += 1;
                update.give(match follows {
                    true => HomeTask::Follow(gradients),
                    false => HomeTask::LookAhead(gradients),
                });
            } else {
                handing.waiting.push((at, gradients));
            }
        }
    }

    /// Whether updates follow the backward that is under way.
    pub(crate) fn is_following(&self) -> bool {
        self.handing.is_some() && self.hands_over == HandsOver::Following
    }

    /// Whether the backward that is under way has gradients for the optimizer, or had.
    pub(crate) fn has_handed(&self) -> bool {
        self.handing.as_ref().is_some_and(|handing| handing.given + handing.waiting.len() > 0)
    }

    /// How many stages have no gradients to be read, because they are updated before.
    pub(crate) fn without_gradients(&self) -> usize {
        let trained = self.stages.iter().flatten().filter(|stage| stage.is_trained());
        trained.filter(|_| self.hands_over == HandsOver::Following).count()
    }

    /// Ends what a step hands over; gives how many stages were updated, or will be.
    pub(crate) fn end_handing(&mut self) -> usize {
        let follows = self.is_following();
        let Some(handing) = self.handing.take().filter(|_| follows) else { return 0 };
        if let Some(update) = &mut self.update {
            update.close();
        }
        handing.given
    }

    /// Starts to bring a stage's sums home. The sums of the stage before it are given up by now: two
    /// stages' are on the device at most.
    pub(crate) fn send_gradients(
        &mut self,
        at: usize,
        accumulator: &mut Accumulator,
        one: Move,
        clock: &mut MoveClock,
    ) -> Result<()> {
        self.forget_left(clock)?;
        let follows = self.is_following();
        let Some(stage) = &mut self.stages[at] else { return Ok(()) };
        let wanted: Vec<bool> = self.places.iter().map(|place| stage.has(*place)).collect();
        let sums = accumulator.take(&wanted);
        let computed = Event::after(Stream::current(self.memory.device)?)?;
        self.outward.outward.wait(&computed)?;
        let home = {
            let _outward = self.outward.outward.enter()?;
            let mut bring = |sum| stage.bring_home(sum, &self.places, &self.memory);
            let bytes = |home: &Vec<Sum>| home.iter().flatten().flatten().map(tensor_bytes).sum();
            clock.moving(one, || sums.iter().map(&mut bring).collect(), bytes)?
        };
        let handing = self.handing.as_mut();
        if let Some(handing) = handing.filter(|_| follows || at != FIRST_PART) {
            let own = stage.named(&home, &self.places, &mut handing.shared);
            let arrived = Event::after(self.outward.outward)?;
            handing.waiting.push((at, StageGradients { of: own, arrived }));
        }
        if !follows {
            self.home.push(home);
        }
        self.leaving = Some((sums, Event::after(self.outward.outward)?));
        Ok(())
    }

    /// Waits until all sums are at home, and adds them to the step's.
    pub(crate) fn finish(&mut self, accumulator: &mut Accumulator) -> Result<()> {
        if let Some((_, arrived)) = self.leaving.take() {
            arrived.synchronize()?;
        }
        // The first stages' first: what several share is added up where its owner has it, and other stages' gradients
        // stay what was looked ahead from.
        self.home.drain(..).rev().try_for_each(|home| accumulator.add_home(home))
    }

    /// Where a variable's home is among the worker's stages, for the optimizer.
    pub(crate) fn home_of(&self, name: &str) -> Option<ParameterHome> {
        let mut stages = self.stages.iter().enumerate();
        let part = stages.find_map(|(at, stage)| stage.as_ref()?.owns(name).then_some(at))?;
        Some(ParameterHome { part, arena: self.memory.arena.clone() })
    }

    /// Lets the optimizer that is here do what it has prepared for the stages at home, while others go on.
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
        // Other stages and devices have taken the step already.
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
            // One is left to the thread that keeps the accelerator busy.
            _ => threads().saturating_sub(1).max(1),
        };
        let thread = thread::Builder::new().name("brimful update".to_owned());
        self.update = Some(Update::start(thread, optimizer, plan, then, threads)?);
        Ok(())
    }

    /// Waits for the update under way, if there is one, and gives the optimizer back.
    pub(crate) fn settle(&mut self) -> Option<(Optimizer, Result<()>)> {
        self.handing = None;
        self.update.take().map(Update::finish)
    }

    /// Sends every parameter home, whatever was under way.
    pub(crate) fn send_all_home(&mut self) -> Result<()> {
        self.late.clear();
        self.slots.leave_all(&self.stages)
    }

    /// Lets go what a step that failed has left.
    pub(crate) fn forget(&mut self, clock: &mut MoveClock) -> Result<()> {
        self.home.clear();
        self.forget_left(clock)
    }

    /// The sums that have left may be written over from now on, by work that comes after their copy.
    fn forget_left(&mut self, clock: &mut MoveClock) -> Result<()> {
        let device = self.memory.device;
        if let Some((_, arrived)) = self.leaving.take()
            && device != Device::Cpu
        {
            clock
                .waiting(Awaited::GradientsRoom, || Ok(Stream::current(device)?.wait(&arrived)?))?;
        }
        Ok(())
    }
}
