//! Replica: a model on its own thread, and its part of a step.

use std::time::Instant;

use tch::nn::{Path, VarStore};
use tch::{Device, Tensor};

use super::mirror::Mirror;
use crate::batch::{Batch, Samples};
use crate::loss::IntoLoss;
use crate::micro::{AttemptSettings, identity};
use crate::oom::{Caught, into_error, into_error_or_panic};
use crate::random::Generator;
use crate::step::{BatchRole, Cut, Engine, MicroBatches, PartFigures, StoreAttempt, names};
use crate::workers::DeviceSpec;
use crate::{Error, MicroBatcher, Result, feed};

/// Setting that every replica's `MicroBatcher` gets before the next step.
pub(super) type Setting = Box<dyn Fn(&mut MicroBatcher) + Send + Sync>;

/// Model on one device, and the `MicroBatcher` that runs it.
pub(super) struct Replica<M> {
    number: usize,
    pub(super) model: M,
    pub(super) micro: MicroBatcher,
    pub(super) store: VarStore,
    /// Pairs with the first replica's variables; empty on the first replica.
    mirror: Mirror,
    /// Device of the first replica.
    pub(super) main_device: Device,
}

/// A replica's part of a mini-batch, with its size and role.
#[derive(Debug)]
pub(super) struct ReplicaJob<B> {
    pub(super) batch: B,
    pub(super) samples: Samples,
    pub(super) size: MicroBatches,
    pub(super) role: BatchRole,
}

impl<B> ReplicaJob<B> {
    pub(super) fn cut(&self) -> Result<Cut> {
        Cut::given(self.samples.clone(), self.size)
    }
}

/// Result of a replica's part before its outputs are moved.
type PartRan<O> = Result<(StoreAttempt, O), Caught<Error>>;

/// Result of a replica's part, not committed.
#[derive(Debug)]
pub(super) struct PartDone<O> {
    pub(super) attempt: StoreAttempt,
    /// Outputs of the part, on the first replica's device.
    pub(super) outputs: O,
    pub(super) figures: PartFigures,
}

impl<M> Replica<M> {
    /// Builds the model in this store, on the thread that it stays on.
    pub(super) fn build(
        number: usize,
        store: VarStore,
        device: &DeviceSpec,
        build: impl Fn(&Path<'_>) -> M,
    ) -> Result<Self> {
        // The first replica draws its parameters as the plain model does. The values that other replicas draw are
        // replaced, so their draws must not move the first replica's generator.
        let generator = (number > 0).then(|| Generator::new(device.device));
        let model = build(&store.root());
        drop(generator);
        let mut micro = MicroBatcher::new(&store, MicroBatches::Count(1));
        if let Some(memory) = device.memory() {
            micro = micro.memory(memory);
        }
        Ok(Self {
            number,
            model,
            micro,
            store,
            mirror: Mirror::default(),
            main_device: device.device,
        })
    }

    /// Makes this replica copy these variables of the first one from now on.
    pub(super) fn follow(&mut self, main_device: Device, first: Vec<(String, Tensor)>) {
        self.main_device = main_device;
        if self.number > 0 {
            self.mirror = Mirror::new(names(&self.store.variables_).into_list(), first);
        }
    }

    /// Copies the current values of the first replica's variables.
    pub(super) fn take_over(&mut self) -> Result<()> {
        self.mirror.take_over()
    }

    /// Runs forward and backward on a part.
    pub(super) fn train<B: Batch, R: IntoLoss>(
        &mut self,
        job: ReplicaJob<B>,
        f: &impl Fn(&M, B) -> R,
    ) -> Result<PartDone<R::Outputs>> {
        let closure = identity(f);
        let done = self.run(job, |micro, model, batch, cut, role| {
            let how = AttemptSettings { role, closure, collective: None, alone: false };
            micro.attempt(batch, cut, &how, &mut |part| f(model, part))
        })?;
        if done.figures.samples > 0 {
            self.micro.learn_format(done.figures.samples, done.figures.time);
        }
        Ok(done)
    }

    /// Runs `how` on a part.
    pub(super) fn run<B: Batch, O: Batch>(
        &mut self,
        job: ReplicaJob<B>,
        how: impl Fn(&mut MicroBatcher, &M, &B, &mut Cut, BatchRole) -> PartRan<O>,
    ) -> Result<PartDone<O>> {
        let start = Instant::now();
        let Self { model, micro, .. } = self;
        let ran =
            in_format(micro, |micro| how(micro, model, &job.batch, &mut job.cut()?, job.role));
        let (attempt, outputs) = ran.map_err(into_error_or_panic)?;
        self.hand_in(attempt, &outputs, start)
    }

    /// Prepares a part for the merge with the others; undoes the part if the preparation fails.
    pub(super) fn hand_in<O: Batch>(
        &mut self,
        attempt: StoreAttempt,
        outputs: &O,
        start: Instant,
    ) -> Result<PartDone<O>> {
        // Copied on each replica's own thread, so that the replicas wait for their devices in parallel.
        let (attempt, outputs) = attempt.off_device(|statistics| {
            if self.number > 0 {
                let twins = self.mirror.twins();
                let twin = |own: &Tensor| twins.get(&own.data_ptr()).map(Tensor::shallow_clone);
                statistics.hand_to(twin)?;
            }
            feed::moved(outputs, self.main_device)
        })?;
        // Measured only after the loss was read from the device: an earlier time would be that of the launches.
        let figures = self.micro.figures_of(&attempt, start);
        let (attempt, figures) = attempt.unless_failed(figures)?;
        Ok(PartDone { attempt, outputs, figures })
    }
}

/// Runs `f`; if that fails in a memory format that is on trial, runs it again in the user's own format.
pub(super) fn in_format<T>(
    micro: &mut MicroBatcher,
    mut f: impl FnMut(&mut MicroBatcher) -> Result<T, Caught<Error>>,
) -> Result<T, Caught<Error>> {
    match f(micro) {
        Err(caught) if micro.is_on_trial() => {
            micro.falls_back(&into_error(caught))?;
            let done = f(micro);
            micro.end_fallback(done.is_ok())?;
            done
        }
        ended => ended,
    }
}
