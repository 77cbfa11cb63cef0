//! One replica: a model on its own thread, and its part of a step.

use std::ops::Range;
use std::time::{Duration, Instant};

use tch::nn::{Path, VarStore};
use tch::{Device, Tensor};

use super::mirror::{Mirror, named};
use crate::batch::Batch;
use crate::bytes::Bytes;
use crate::crew::StageDevice;
use crate::micro::attempt::{OwnDraws, Scale};
use crate::micro::cut::Cut;
use crate::micro::whole::RowGradients;
use crate::micro::{Closure, Outcome, Window};
use crate::random::Dice;
use crate::ranks::RanksTurn;
use crate::world::World;
use crate::{MicroBatcher, Result, Size, feed};

/// A model and what runs it.
pub(super) struct Replica<M> {
    number: usize,
    model: M,
    micro: MicroBatcher,
    store: VarStore,
    /// The first one's variables; nothing on the first one itself.
    mirror: Mirror,
    /// The device of the first one.
    home: Device,
}

/// A replica's part of a mini-batch, and how it is to be run.
#[derive(Debug)]
pub(super) struct Errand<B> {
    pub(super) batch: B,
    pub(super) ranges: Vec<Range<usize>>,
    pub(super) scale: Scale,
}

/// What came of it; nothing is committed.
#[derive(Debug)]
pub(super) struct Done<O> {
    pub(super) window: Window,
    /// On the first replica's device.
    pub(super) outputs: O,
    pub(super) time: Duration,
    pub(super) peak: Option<Bytes>,
    /// Micro-batches that were replayed.
    pub(super) replayed: usize,
}

impl<M> Replica<M> {
    /// Builds the model in this store, on the thread that it will stay on.
    pub(super) fn build(
        number: usize,
        store: VarStore,
        device: &StageDevice,
        build: impl Fn(&Path<'_>) -> M,
    ) -> Result<Self> {
        // The first one draws its parameters as the plain model does. What others draw is replaced,
        // and must not disturb that.
        let dice = (number > 0).then(|| Dice::new(device.device));
        let model = build(&store.root());
        drop(dice);
        let mut micro = MicroBatcher::new(&store, Size::Count(1));
        if let Some(memory) = device.memory() {
            micro = micro.memory(memory);
        }
        let (mirror, home) = (Mirror::default(), device.device);
        Ok(Self { number, model, micro, store, mirror, home })
    }

    /// Takes these variables of the first replica over from now on.
    pub(super) fn follow(&mut self, home: Device, first: Vec<(String, Tensor)>) {
        self.home = home;
        if self.number > 0 {
            self.mirror = Mirror::new(named(&self.store), first);
        }
    }

    /// Changes how micro-batches are run.
    pub(super) fn set(&mut self, f: impl FnOnce(&mut MicroBatcher)) {
        f(&mut self.micro);
    }

    /// Why they run eagerly although they were to be replayed.
    pub(super) fn eager_cause(&self) -> Option<String> {
        self.micro.eager_cause().map(str::to_owned)
    }

    /// Commits what all replicas have done, of all ranks, on the first one.
    pub(super) fn settle(
        &mut self,
        window: Window,
        ranks: Option<(World, RanksTurn)>,
        start: Instant,
    ) -> Result<crate::Step> {
        match ranks {
            Some((world, turn)) => self.micro.settle_together(&world, &turn, window, start),
            None => self.micro.settle(window, start),
        }
    }

    /// Takes over what the first replica's variables are now.
    pub(super) fn take_over(&mut self) -> Result<()> {
        self.mirror.take_over()
    }

    /// Runs forward and backward.
    pub(super) fn train<B: Batch, R: Outcome>(
        &mut self,
        errand: Errand<B>,
        f: &impl Fn(&M, B) -> R,
    ) -> Result<Done<R::Outputs>> {
        let closure = Closure::of(f);
        let done = self.run(errand, |micro, model, batch, cut, scale| {
            micro.attempt(batch, cut, scale, closure, &mut |part| f(model, part))
        })?;
        if !done.window.sizes.is_empty() {
            self.micro.learn_order(done.window.sizes.iter().sum(), done.time);
        }
        Ok(done)
    }

    /// Runs forward and a loss, without gradients.
    pub(super) fn evaluate<B: Batch, R: Outcome>(
        &mut self,
        errand: Errand<B>,
        f: &impl Fn(&M, B) -> R,
    ) -> Result<Done<R::Outputs>> {
        self.run(errand, |micro, model, batch, cut, scale| {
            micro.attempt_evaluate(batch, cut, scale, &mut |part| f(model, part))
        })
    }

    /// Runs forward without a graph; nothing is as if it had been run, but for the outputs, which are
    /// on the first replica's device.
    pub(super) fn rehearse<B: Batch, O: Batch>(
        &mut self,
        errand: Errand<B>,
        f: &impl Fn(&M, B) -> O,
    ) -> Result<O> {
        let (Errand { batch, ranges, scale }, model) = (errand, &self.model);
        let outputs = self.micro.rehearse(&batch, ranges, scale, |part| f(model, part))?;
        feed::moved(&outputs, self.home)
    }

    /// Runs a loss on all outputs, and its backward to them.
    pub(super) fn weigh<O: Batch>(
        &mut self,
        outputs: &O,
        draws: OwnDraws,
        loss: &impl Fn(&M, &O) -> Tensor,
    ) -> Result<(Window, RowGradients)> {
        let model = &self.model;
        let (window, gradients) =
            self.micro.attempt_loss(outputs, draws, |outputs| loss(model, outputs))?;
        Ok((window.off_device(|_| Ok(()))?.0, gradients))
    }

    /// Runs forward again, and backward from the outputs' gradients.
    pub(super) fn back<B: Batch, O: Batch>(
        &mut self,
        errand: Errand<(B, RowGradients)>,
        f: &impl Fn(&M, B) -> O,
    ) -> Result<Done<()>> {
        let start = Instant::now();
        let Errand { batch: (batch, gradients), ranges, scale } = errand;
        let (mut cut, gradients) = (Cut::given(ranges), gradients.on(self.store.device())?);
        let model = &self.model;
        let forward = |part| f(model, part);
        let window = self.micro.attempt_back(&batch, &mut cut, scale, gradients, &forward)?;
        self.hand_in(window, &(), start)
    }

    /// Runs forward, without gradients.
    pub(super) fn map<B: Batch, O: Batch>(
        &mut self,
        errand: Errand<B>,
        f: &impl Fn(&M, B) -> O,
    ) -> Result<Done<O>> {
        self.run(errand, |micro, model, batch, cut, scale| {
            micro.attempt_map(batch, cut, scale, &mut |part| f(model, part))
        })
    }

    /// Lets `how` run the errand.
    fn run<B: Batch, O: Batch>(
        &mut self,
        errand: Errand<B>,
        how: impl Fn(&mut MicroBatcher, &M, &B, &mut Cut, Scale) -> Result<(Window, O)>,
    ) -> Result<Done<O>> {
        let start = Instant::now();
        let Errand { batch, ranges, scale } = errand;
        let Self { model, micro, .. } = self;
        let (window, outputs) = micro
            .in_order(|micro| how(micro, model, &batch, &mut Cut::given(ranges.clone()), scale))?;
        self.hand_in(window, &outputs, start)
    }

    /// Makes what was done ready to be added to what the others did; undone where that fails.
    fn hand_in<O: Batch>(
        &mut self,
        window: Window,
        outputs: &O,
        start: Instant,
    ) -> Result<Done<O>> {
        let (window, (outputs, peak)) = window.off_device(|statistics| {
            if self.number > 0 {
                let twins = self.mirror.twins();
                let twin = |own: &Tensor| twins.get(&own.data_ptr()).map(Tensor::shallow_clone);
                statistics.hand_to(twin)?;
            }
            Ok((feed::moved(outputs, self.home)?, self.micro.take_peak()?))
        })?;
        let replayed = self.micro.take_replayed();
        Ok(Done { window, outputs, time: start.elapsed(), peak, replayed })
    }
}
