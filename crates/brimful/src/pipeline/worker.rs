//! One worker: a thread's own stages, their variables, and the step that it has under way.

use std::cell::Cell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use brimful_torch::foreach;
use tch::nn::VarStore;
use tch::{Device, Tensor};

use super::layout::StageLayout;
use super::recompute;
use super::run::WorkerRun;
use super::stage::{Boundary, Stage, StagePass};
use super::variables::Variables;
use crate::Result;
use crate::bytes::Bytes;
use crate::copies::Copies;
use crate::memory::Memory;
use crate::optim::Optimizer;
use crate::random::{Draws, Generator};
use crate::schedule::Span;
use crate::step::{NonFinite, Tally, Tried, Undo, UnmanagedStatistics};
use crate::workers::StageDevice;

/// What a worker is made from.
#[derive(Debug)]
pub(super) struct Blueprint {
    pub(super) layout: Arc<StageLayout>,
    /// In its pipeline.
    pub(super) number: usize,
    /// Which of this process's pipelines it is of.
    pub(super) replica: usize,
    pub(super) device: StageDevice,
    /// Of workers that share an accelerator, and so its random numbers.
    pub(super) turn: Option<Arc<Mutex<()>>>,
    pub(super) kind: tch::Kind,
    /// Of the parameters' first values.
    pub(super) seed: u64,
    pub(super) non_finite: NonFinite,
}

/// Where stages run: all that does not change from step to step.
#[derive(Debug)]
pub(super) struct Site {
    pub(super) device: Device,
    pub(super) stages: Vec<Stage>,
    /// From other stages, and of the model's inputs, which come ahead of their use.
    pub(super) dock: Copies,
    pub(super) inputs: Copies,
    pub(super) generator: Generator,
    /// The position of the layer that is running.
    pub(super) layer: Cell<Option<usize>>,
    /// How many layers the whole model has.
    pub(super) model_length: usize,
    layout: Arc<StageLayout>,
    turn: Option<Arc<Mutex<()>>>,
    /// Whether a parameter of this worker is trained.
    pub(super) trains: bool,
    /// Whether gradients that are not finite are refused.
    pub(super) refuses_gradients: bool,
    /// Running statistics that move at every run, as tensors whose changes autograd does not see: it
    /// takes them for inputs of the backward, which they are not.
    pub(super) unmanaged: Vec<Tensor>,
}

/// One thread's part of the pipeline.
pub(super) struct Worker {
    /// In its pipeline.
    pub(super) number: usize,
    pub(super) has_first_stage: bool,
    pub(super) site: Site,
    pub(super) variables: Variables,
    pub(super) memory: Option<Memory>,
    pub(super) optimizer: Option<Optimizer>,
    pub(super) non_finite: NonFinite,
    /// BatchNorm layers that do not know of steps, such as tch's own.
    pub(super) unmanaged: UnmanagedStatistics,
    pub(super) store: VarStore,
    /// A forward that waits for its backward.
    pub(super) open: Option<(WorkerRun, Undo)>,
    /// A mini-batch that was run and not committed.
    pub(super) tried: Option<Tried>,
    /// Earlier mini-batches of the same step, which wait for their commit.
    pub(super) window: Option<Tried>,
    /// The actions of the last mini-batch with their times, and the most memory in use.
    pub(super) spans: Vec<Span>,
    pub(super) peak: Option<Bytes>,
}

impl Site {
    /// Runs one of the stages.
    pub(super) fn run(&self, at: usize, input: Boundary, pass: StagePass<'_>) -> Boundary {
        let _turn = self.turn();
        self.stages[at].run(input, pass)
    }

    /// Runs it a second time for the same micro-batch, which no running statistic sees.
    pub(super) fn run_again(
        &self,
        at: usize,
        input: Boundary,
        pass: StagePass<'_>,
    ) -> Result<Boundary> {
        let copy = |running: &Tensor| Ok(running.f_detach_copy()?);
        let before = self.unmanaged.iter().map(copy).collect::<Result<Vec<_>>>()?;
        let output = recompute::again(|| self.run(at, input, pass));
        if !before.is_empty() {
            foreach::copy(&self.unmanaged, &before)?;
        }
        Ok(output)
    }

    /// Waits until nobody else draws from the same generator.
    pub(super) fn turn(&self) -> Option<MutexGuard<'_, ()>> {
        self.turn.as_ref().map(taken)
    }

    pub(super) fn layer_name(&self, position: usize) -> String {
        self.layout.layers.names().nth(position).unwrap_or_default().to_owned()
    }
}

impl Worker {
    /// Builds the worker's stages, on its own thread.
    pub(super) fn build(blueprint: &Blueprint) -> Result<Self> {
        let Blueprint { layout, number, replica, device, turn, kind, seed, non_finite } = blueprint;
        let (generator, first) = (Generator::new(device.device), Draws::new(*seed, 0));
        let mut store = VarStore::new(device.device);
        let mut stages = Vec::new();
        for (id, plan) in layout.of_worker(*number) {
            let _turn = turn.as_ref().map(taken);
            let before = |position| generator.seed(first.seed(position));
            let built =
                layout.layers.build_range_watched(&store.root(), plan.range.clone(), before);
            stages.push(Stage::new(id, built?, plan));
        }
        if *kind != tch::Kind::Float {
            store.set_kind(*kind);
        }
        let site = Site {
            device: device.device,
            stages,
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
    pub(super) fn tally(&self) -> Tally {
        self.window.as_ref().map_or_else(Tally::default, |window| window.tally.following())
    }
}

/// A turn; a layer that panicked in its own leaves nothing to be feared.
fn taken(turn: &Arc<Mutex<()>>) -> MutexGuard<'_, ()> {
    turn.lock().unwrap_or_else(PoisonError::into_inner)
}
