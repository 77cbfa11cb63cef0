//! Pipeline parallelism: a model spread over devices, with every device busy.
//!
//! The layers are cut into stages. One long-lived thread for each device owns its stages and runs
//! its list of the schedule's actions; values, gradients and skips go from stage to stage. A step
//! leaves exactly the gradients that the plain model has on the whole mini-batch.
//!
//! ```
//! use brimful::optim::Sgd;
//! use brimful::pipeline::StageDevice;
//! use brimful::schedule::Schedule;
//! use brimful::{Layers, Loss, Pipeline};
//! use tch::{Device, Kind, Tensor, nn};
//!
//! let layers = Layers::new()
//!     .add("hidden", |p| nn::linear(p, 4, 8, Default::default()))
//!     .add_fn("relu", |x| x.relu())
//!     .add("output", |p| nn::linear(p, 8, 3, Default::default()));
//! let mut pipe = Pipeline::builder(layers)
//!     .devices([StageDevice::cpu(), StageDevice::cpu()])
//!     .balance([2, 1])
//!     .micro_batches(4)
//!     .schedule(Schedule::OneFOneB)
//!     .build()?;
//! let mut opt = pipe.optimizer(Sgd::new(0.1))?;
//!
//! let x = Tensor::randn([16, 4], (Kind::Float, Device::Cpu));
//! let y = Tensor::randint(3, [16], (Kind::Int64, Device::Cpu));
//! let step = pipe.step(&x, &y, |out, y| Loss::mean(out.cross_entropy_for_logits(y)))?;
//! opt.step()?;
//! opt.zero_grad()?;
//! assert_eq!(step.sizes, [4, 4, 4, 4]);
//! # Ok::<(), brimful::Error>(())
//! ```
//!
//! *Atomic.* A step in which anything fails, in whatever stage, leaves gradients, statistics and
//! random state as they were, and an error that says where ([`StageError`]). The next one works.
//!
//! *Random numbers* belong to a step, a layer and a micro-batch ([`Draws`](crate::Draws)): they
//! depend neither on the schedule nor on the balance, and a recomputed layer draws the same again.

mod attempt;
mod backward;
mod balance;
mod builder;
mod commit;
mod company;
mod error;
mod evaluate;
mod exchange;
mod head;
mod intake;
mod job;
mod layout;
mod optimizer;
mod optimizer_state;
mod outputs;
mod own_actions;
mod portion;
mod ranks;
mod recompute;
mod report;
mod run;
mod saved;
mod sized;
mod stage;
mod step;
mod ties;
mod timeline;
mod transfer;
mod variables;
mod whole;
mod wiring;
mod worker;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tch::{Device, Tensor};

pub use crate::crew::StageDevice;
pub use balance::Balance;
pub use builder::Builder;
pub use error::{Cause, PipelineError, StageError};
pub use optimizer::PipelineOptimizer;
pub use recompute::is_recomputing;
pub use report::Step;
pub use whole::Outputs;

use crate::batch::{self, Batch};
use crate::crew::Crew;
use crate::micro::NonFinite;
use crate::schedule::{Actions, Recompute, Schedule};
use crate::world::Turn;
use crate::{Layers, Result, Size};
use job::{End, Job};
use layout::Layout;
use portion::Portion;
use ranks::{Described, Ranks};
use sized::PipelineSizes;
use worker::Worker;

/// A model spread over devices.
///
/// Made by [`Pipeline::builder`]. Dropped, it waits until its threads have ended.
#[derive(Debug)]
pub struct Pipeline {
    /// Shared with the optimizers, which take turns with the pipeline.
    crew: Arc<Mutex<Crew<Worker>>>,
    layout: Arc<Layout>,
    ranks: Ranks,
    /// Of this rank.
    devices: Vec<StageDevice>,
    balance: crate::balance::Balance,
    schedule: Schedule,
    recompute: Recompute,
    non_finite: NonFinite,
    size: Size,
    /// The lists of actions, by number of micro-batches.
    actions: HashMap<usize, Arc<Actions>>,
    /// The forward that waits for its backward, by number, with its channels.
    open: Option<(u64, Turn)>,
    forwards: u64,
    sizes: PipelineSizes,
}

impl Pipeline {
    /// Describes a pipeline of these layers.
    pub fn builder(layers: Layers) -> Builder {
        Builder::new(layers)
    }

    /// How many layers each stage has.
    pub fn balance(&self) -> &crate::balance::Balance {
        &self.balance
    }

    /// The devices that have a stage, in the order of the schedule; in a world, those of this rank.
    pub fn devices(&self) -> &[StageDevice] {
        &self.devices
    }

    /// The device of the last stage, where outputs and losses are; in ranks without it, the CPU.
    pub fn output_device(&self) -> Device {
        let last = self.layout.last_worker();
        let device = |worker: usize| self.devices[worker - self.ranks.here().start].device;
        if self.ranks.has(last) { device(last) } else { Device::Cpu }
    }

    /// The layers' names, in order.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.layout.layers.names()
    }

    /// How a mini-batch is cut from now on.
    pub fn set_micro_batches(&mut self, size: impl Into<Size>) {
        self.size = size.into();
    }

    /// The actions of a step of so many micro-batches, as they are executed.
    ///
    /// # Errors
    /// When there are more than any step has.
    pub fn actions(&mut self, micro_batches: usize) -> Result<Arc<Actions>> {
        if let Some(known) = self.actions.get(&micro_batches) {
            return Ok(Arc::clone(known));
        }
        let made = self.schedule.actions(self.layout.workers, micro_batches, self.recompute)?;
        let made = Arc::new(made);
        self.actions.insert(micro_batches, Arc::clone(&made));
        Ok(made)
    }

    fn crew(&self) -> MutexGuard<'_, Crew<Worker>> {
        self.crew.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes sure that all ranks have the same mini-batch and that all copies are what their owners
    /// are, and gives the seed of all.
    fn open(&self, what: &str, batch: &[&dyn Described], seed: u64) -> Result<u64> {
        let (mut crew, ranks) = (self.crew(), &self.ranks);
        crew.involve(batch.iter().flat_map(|batch| batch.devices()));
        let changed = ties::have_changed(&crew, ranks)?;
        let (seed, changed) = ranks.open(what, batch, seed, changed)?;
        if changed {
            ties::spread(&crew, ranks)?;
        }
        Ok(seed)
    }

    /// What each worker of this rank is to do with these micro-batches; nothing where there are none.
    fn jobs(&self, actions: &Arc<Actions>, work: Work<'_>, turn: &Turn) -> Result<Vec<Job>> {
        let Work { portion, inputs, end, train, seed, start } = work;
        let here = self.ranks.here();
        if portion.own().is_empty() {
            return Ok(Vec::new());
        }
        let parts = portion.parts();
        let memory = |worker: usize| self.devices[worker - here.start].memory();
        let ports = wiring::wire(&self.layout, actions, &self.ranks, turn, memory)?;
        let mut ports: Vec<_> = ports.into_iter().map(Some).collect();
        let (mut inputs, mut end) = (Some(inputs), Some(end));
        let job = |worker| Job {
            actions: Arc::clone(actions),
            ports: (self.layout.of_worker(worker))
                .filter_map(|(stage, _)| ports[stage.index()].take())
                .collect(),
            inputs: (inputs.take_if(|_| worker == self.layout.first_worker())).unwrap_or_default(),
            end: (end.take_if(|_| worker == self.layout.last_worker())).unwrap_or(End::Elsewhere),
            summing: self.ranks.summing(turn, worker).filter(|_| train),
            first: portion.first(),
            train,
            seed,
            parts: Arc::clone(&parts),
            start,
        };
        Ok(here.clone().map(job).collect())
    }
}

/// What is to be done with a mini-batch.
struct Work<'a> {
    portion: &'a Portion,
    inputs: Vec<Vec<Tensor>>,
    end: End,
    train: bool,
    seed: u64,
    start: Instant,
}

/// The leaves of each micro-batch of a training step, behind which there must be no graph: a gradient
/// for it would be lost.
fn training_inputs(batch: &impl Batch, ranges: &[Range<usize>]) -> Result<Vec<Vec<Tensor>>> {
    let mut traced = Vec::new();
    batch.visit(&mut |leaf| traced.push(leaf.tensor().requires_grad()));
    match traced.into_iter().position(|traced| traced) {
        Some(leaf) => Err(PipelineError::InputGradient { leaf }.into()),
        None => inputs(batch, ranges),
    }
}

/// The leaves of each micro-batch, without the graph behind them.
fn inputs(batch: &impl Batch, ranges: &[Range<usize>]) -> Result<Vec<Vec<Tensor>>> {
    let leaves = |range: &Range<usize>| {
        let mut leaves = Vec::new();
        batch::slice(batch, range.clone())?.visit(&mut |leaf| leaves.push(leaf.tensor().detach()));
        Ok(leaves)
    };
    ranges.iter().map(leaves).collect()
}

impl From<usize> for Size {
    /// So many micro-batches.
    fn from(count: usize) -> Self {
        Self::Count(count)
    }
}
