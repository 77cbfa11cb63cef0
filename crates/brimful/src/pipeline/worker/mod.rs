//! One worker: a thread's own stages, their variables, and the step that it has under way.

mod attempt;
mod commit;
mod variables;

pub(crate) use attempt::{Tells, WorkerDone};
use std::cell::Cell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
pub(crate) use variables::{Variable, Variables};

use brimful_torch::foreach;
use tch::nn::VarStore;
use tch::{Device, Tensor};

use crate::Result;
use crate::bytes::Bytes;
use crate::copies::Copies;
use crate::memory::Memory;
use crate::optim::{Ema, Optimizer};
use crate::pipeline::build::StageLayout;
use crate::pipeline::run::WorkerRun;
use crate::pipeline::run::run_again;
use crate::pipeline::run::{Boundary, Stage, StagePass};
use crate::random::{Draws, Generator};
use crate::schedule::Span;
use crate::step::{NonFinite, Tally, Tried, Undo, UnmanagedStatistics};
use crate::workers::DeviceSpec;

/// What a worker is made from.
#[derive(Debug)]
pub(crate) struct Blueprint {
    pub(crate) layout: Arc<StageLayout>,
    /// In its pipeline.
    pub(crate) number: usize,
    /// Which of this process's pipelines it is of.
    pub(crate) replica: usize,
    pub(crate) device: DeviceSpec,
    /// Of workers that share an accelerator, and so its random numbers.
    pub(crate) turn: Option<Arc<Mutex<()>>>,
    pub(crate) kind: tch::Kind,
    /// Of the parameters' first values.
    pub(crate) seed: u64,
    pub(crate) non_finite: NonFinite,
}

/// Where stages run: all that does not change from step to step.
#[derive(Debug)]
pub(crate) struct Site {
    pub(crate) device: Device,
    pub(crate) stages: Vec<Stage>,
    /// From other stages, and of the model's inputs, which come ahead of their use.
    pub(crate) dock: Copies,
    pub(crate) inputs: Copies,
    pub(crate) generator: Generator,
    /// The position of the layer that is running.
    pub(crate) layer: Cell<Option<usize>>,
    /// How many layers the whole model has.
    pub(crate) model_length: usize,
    layout: Arc<StageLayout>,
    turn: Option<Arc<Mutex<()>>>,
    /// Whether a parameter of this worker is trained.
    pub(crate) trains: bool,
    /// Whether gradients that are not finite are refused.
    pub(crate) refuses_gradients: bool,
    /// Running statistics that move at every run, as tensors whose changes autograd does not see: it
    /// takes them for inputs of the backward, which they are not.
    pub(crate) unmanaged: Vec<Tensor>,
}

/// One thread's part of the pipeline.
pub(crate) struct Worker {
    /// In its pipeline.
    pub(crate) number: usize,
    pub(crate) has_first_stage: bool,
    pub(crate) site: Site,
    pub(crate) variables: Variables,
    pub(crate) memory: Option<Memory>,
    pub(crate) optimizer: Option<Optimizer>,
    pub(crate) ema: Option<Ema>,
    pub(crate) non_finite: NonFinite,
    /// BatchNorm layers that do not know of steps, such as tch's own.
    pub(crate) unmanaged: UnmanagedStatistics,
    pub(crate) store: VarStore,
    /// A forward that waits for its backward.
    pub(crate) open: Option<(WorkerRun, Undo)>,
    /// A mini-batch that was run and not committed.
    pub(crate) tried: Option<Tried>,
    /// Earlier mini-batches of the same step, which wait for their commit.
    pub(crate) window: Option<Tried>,
    /// The actions of the last mini-batch with their times, and the most memory in use.
    pub(crate) spans: Vec<Span>,
    pub(crate) peak: Option<Bytes>,
}

impl Blueprint {
    /// Builds the stages in this store.
    fn stages(&self, store: &VarStore, generator: &Generator) -> Result<Vec<Stage>> {
        let Self { layout, number, turn, seed, .. } = self;
        let first = Draws::new(*seed, 0);
        let mut stages = Vec::new();
        for (id, plan) in layout.of_worker(*number) {
            // Held for a whole stage: another worker of this accelerator would draw in between.
            let _turn = turn.as_ref().map(taken);
            // Each layer from a seed of its own: first values do not depend on the balance.
            let built =
                layout.layers.build_range_watched(&store.root(), plan.range.clone(), |position| {
                    generator.seed(first.seed(position))
                });
            stages.push(Stage::new(id, built?, plan));
        }
        Ok(stages)
    }
}

impl Site {
    /// Runs one of the stages.
    pub(crate) fn run(&self, at: usize, input: Boundary, pass: StagePass<'_>) -> Boundary {
        // Held until all is launched, not computed: a kernel gets its random state at its launch.
        let _turn = self.turn();
        self.stages[at].run(input, pass)
    }

    /// Runs it a second time for the same micro-batch, which no running statistic sees.
    pub(crate) fn run_again(
        &self,
        at: usize,
        input: Boundary,
        pass: StagePass<'_>,
    ) -> Result<Boundary> {
        // Layers that do not know of steps would move their statistics at the second run too.
        let copy = |running: &Tensor| Ok(running.f_detach_copy()?);
        let before = self.unmanaged.iter().map(copy).collect::<Result<Vec<_>>>()?;
        let output = run_again(|| self.run(at, input, pass));
        if !before.is_empty() {
            foreach::copy(&self.unmanaged, &before)?;
        }
        Ok(output)
    }

    /// Waits until nobody else draws from the same generator.
    pub(crate) fn turn(&self) -> Option<MutexGuard<'_, ()>> {
        self.turn.as_ref().map(taken)
    }

    pub(crate) fn layer_name(&self, position: usize) -> String {
        self.layout.layers.names().nth(position).unwrap_or_default().to_owned()
    }
}

impl Worker {
    /// Builds the worker's stages, on its own thread.
    pub(crate) fn build(blueprint: &Blueprint) -> Result<Self> {
        let Blueprint { layout, number, replica, device, turn, kind, non_finite, .. } = blueprint;
        // Before the layers, which on a CPU would else draw from the one that all threads share.
        let generator = Generator::new(device.device);
        let mut store = VarStore::new(device.device);
        let stages = blueprint.stages(&store, &generator)?;
        if *kind != tch::Kind::Float {
            store.set_kind(*kind);
        }
        let site = Site {
            device: device.device,
            stages,
            // Two, each with streams: a neighbour's gradient must not queue behind the next inputs.
            dock: Copies::new(device.device),
            inputs: Copies::new(device.device),
            generator,
            turn: turn.clone(),
            layer: Cell::new(None),
            model_length: layout.layers.len(),
            layout: Arc::clone(layout),
            trains: true,
            refuses_gradients: *non_finite == NonFinite::RefuseGradients,
            unmanaged: Vec::new(),
        };
        Ok(Self {
            number: *number,
            has_first_stage: *number == layout.first_worker(),
            site,
            variables: Variables::of(&store, layout, *number, *replica),
            memory: device.memory(),
            optimizer: None,
            ema: None,
            non_finite: *non_finite,
            unmanaged: UnmanagedStatistics::default(),
            store,
            open: None,
            tried: None,
            window: None,
            spans: Vec::new(),
            peak: None,
        })
    }

    /// What a mini-batch's losses are counted in, after those that wait.
    pub(crate) fn tally(&self) -> Tally {
        self.window.as_ref().map_or_else(Tally::default, |window| window.tally.following())
    }
}

/// A turn; a layer that panicked in its own leaves nothing to be feared.
fn taken(turn: &Arc<Mutex<()>>) -> MutexGuard<'_, ()> {
    turn.lock().unwrap_or_else(PoisonError::into_inner)
}
