//! All kinds of engines behind one interface. A new kind implements [`Engine`] and is added to [`HERE`] or
//! [`OVER_RANKS`].

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use brimful::layers::Model;
use brimful::memory::{Arena, Memory};
use brimful::nn::BatchNormPolicy;
use brimful::optim::Method;
use brimful::pipeline::{Builder, Offload};
use brimful::schedule::{Recompute, Schedule};
use brimful::{
    DeviceSpec, Layers, Loss, MicroBatcher, MicroBatches, Pipeline, Replicas, Result, StepReport,
    World,
};
use brimful_plan::split;
use tch::nn::{ModuleT, VarStore};
use tch::{Device, Kind, Tensor};

use crate::support::{Named, clear, copies, gradients, set_values, variables};

/// Targets of samples, their tokens, and their numbers in the mini-batch.
pub type Target = (Tensor, Tensor, Tensor);

/// Inputs and targets.
pub type Samples = (Tensor, Target);

/// Loss of a micro-batch's outputs.
pub type LossFn = Arc<dyn Fn(&Tensor, &Target) -> std::result::Result<Loss, String> + Send + Sync>;

/// Loss of all outputs.
pub type WholeLoss = fn(&Tensor) -> Tensor;

/// Report of a step on all outputs.
pub struct WholeStep {
    pub loss: f64,
    pub terms: Vec<f64>,
    pub seed: Option<u64>,
    pub outputs: Tensor,
}

impl WholeStep {
    fn of<O>(step: &StepReport<O>, outputs: &Tensor) -> Self {
        let (terms, outputs) = (step.terms.clone(), outputs.detach());
        Self { loss: step.loss, terms, seed: step.seed, outputs }
    }
}

/// Constructor of an engine.
pub type Make = fn(&Setup) -> Box<dyn Engine>;

/// Kinds that need one process.
pub const HERE: &[Make] =
    &[one_device, replicas, pipeline, replicated_pipeline, streamed, split_pipeline, exact];

/// Kinds that can be spread over ranks.
#[cfg(feature = "mpi")]
pub const OVER_RANKS: &[Make] = &[one_device, replicas, pipeline, split_pipeline];

/// A pipeline of each named schedule, for what may depend on its actions alone.
pub const NAMED: &[Make] = &[
    named::<0>, named::<1>, named::<2>, named::<3>, named::<4>, named::<5>, named::<6>, named::<7>,
    named::<8>, named::<9>,
];

/// One of them, with several stages in each rank.
#[cfg(feature = "mpi")]
pub const NAMED_OVER_RANKS: &[Make] = &[named::<2>];

/// Constructor of layers with BatchNorms of this policy.
pub type MakeLayers = fn(BatchNormPolicy) -> Layers;

/// Settings of an engine.
pub struct Setup {
    pub layers: MakeLayers,
    pub size: MicroBatches,
    /// Bytes of each memory beside the model.
    pub limit: Option<u64>,
    /// Optimizer whose state memory is reserved for.
    pub reserve: Option<Method>,
    pub remember: Option<PathBuf>,
    pub world: World,
}

impl Setup {
    pub fn new(layers: MakeLayers, size: MicroBatches, world: &World) -> Self {
        let world = world.clone();
        Self { layers, size, limit: None, reserve: None, remember: None, world }
    }

    /// Returns the layers for every kind but the exact one.
    fn usual_layers(&self) -> Layers {
        (self.layers)(BatchNormPolicy::Deferred)
    }
}

/// Source of a step's random numbers, so that a plain model can draw the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Drawing {
    /// The default generator.
    AsPlainLoop,
    /// A seed for each part and micro-batch.
    ByPart,
    /// A seed for each micro-batch of all parts and each layer.
    ByLayer,
}

/// Properties of an engine that the tests depend on.
pub struct About {
    pub name: &'static str,
    /// Memories of this process.
    pub arenas: Vec<Arena>,
    /// Number of its threads.
    pub threads: usize,
    /// Number of parts of a mini-batch, over all ranks.
    parts: usize,
    /// Parts of this process.
    pub own: Range<usize>,
    /// This process's rank.
    pub rank: usize,
    pub size: MicroBatches,
    pub drawing: Drawing,
    /// True if each rank handles a window's mini-batches alone until the commit.
    pub accumulates_apart: bool,
    /// True if an optimizer's state is on the host, and takes no memory of the engine's.
    pub is_offloaded: bool,
    /// True if the statistics of the whole mini-batch normalise, whatever the micro-batch size.
    pub is_exact: bool,
    /// True if it supports a loss of all outputs.
    pub has_whole: bool,
}

impl About {
    /// Describes an engine in one process, with a thread for each memory.
    fn new(
        name: &'static str,
        memories: usize,
        parts: usize,
        drawing: Drawing,
        setup: &Setup,
    ) -> Self {
        let arenas = (0..memories).map(|number| Arena::new(&format!("memory {number}"))).collect();
        Self {
            name,
            arenas,
            threads: memories,
            parts,
            own: 0..parts,
            rank: setup.world.rank(),
            size: setup.size,
            drawing,
            accumulates_apart: false,
            is_offloaded: false,
            is_exact: false,
            has_whole: true,
        }
    }

    /// Returns the parts of a mini-batch, the last ones empty if there are too few samples.
    pub fn dealt(&self, samples: usize) -> Vec<Range<usize>> {
        let mut all = split::by_count(samples, self.parts).expect("samples");
        all.resize(self.parts, samples..samples);
        all
    }

    /// Returns this process's rows of a mini-batch, which follow each other.
    fn own_rows(&self, batch: &Samples) -> Samples {
        let dealt = self.dealt(samples(batch));
        let own = &dealt[self.own.clone()];
        rows(batch, &(own[0].start..own[own.len() - 1].end))
    }

    /// Returns the number by which a part draws: ranks come first, so that the first part of each draws as if the
    /// rank had no other.
    pub fn drawn_as(&self, part: usize) -> usize {
        let own = self.own.len();
        part / own + part % own * (self.parts / own)
    }

    fn devices(&self) -> impl Iterator<Item = DeviceSpec> {
        self.arenas.iter().map(|arena| DeviceSpec::cpu().threads(1).arena(arena.clone()))
    }

    /// Limits each memory; the model itself is allocated already.
    fn limit(&self, setup: &Setup) {
        for arena in &self.arenas {
            arena.set_limit(setup.limit.map(|bytes| arena.current() + bytes)).expect("a limit");
        }
    }
}

/// Engine with its model. Mini-batches are passed whole; each rank takes its part.
pub trait Engine {
    fn about(&self) -> &About;
    fn backward(&mut self, batch: &Samples, loss: &LossFn) -> Result<StepReport>;
    fn backward_whole(&mut self, batch: &Samples, loss: WholeLoss) -> Result<WholeStep>;
    fn accumulate(&mut self, batch: &Samples, loss: &LossFn) -> Result<()>;
    fn commit(&mut self) -> Result<StepReport>;
    /// Returns the loss, and the outputs of this process's parts.
    fn evaluate(&mut self, batch: &Samples, loss: &LossFn) -> Result<StepReport<Tensor>>;

    /// Returns all variables by name; over ranks, those visible to this rank.
    fn variables(&self) -> Named;
    /// Returns the gradients that exist.
    fn gradients(&self) -> Named;
    fn set_variables(&mut self, values: &Named);
    fn zero_grad(&mut self);
}

/// Returns these rows of a mini-batch.
fn rows((x, (y, tokens, number)): &Samples, range: &Range<usize>) -> Samples {
    let rows = |t: &Tensor| t.narrow(0, range.start as i64, range.len() as i64);
    (rows(x), (rows(y), rows(tokens), rows(number)))
}

fn samples((x, _): &Samples) -> usize {
    x.size()[0] as usize
}

/// A `MicroBatcher`, alone or in each rank.
struct OneDevice {
    store: VarStore,
    model: Model,
    micro: MicroBatcher,
    about: About,
}

pub fn one_device(setup: &Setup) -> Box<dyn Engine> {
    let mut store = VarStore::new(Device::Cpu);
    let model = setup.usual_layers().build(&store.root()).expect("built");
    store.set_kind(Kind::Double);
    let (rank, ranks) = (setup.world.rank(), setup.world.size());
    let (name, drawing) = match ranks {
        1 => ("one device", Drawing::AsPlainLoop),
        _ => ("one device in each rank", Drawing::ByPart),
    };
    let about = About {
        threads: 0,
        own: rank..rank + 1,
        accumulates_apart: ranks > 1,
        has_whole: ranks == 1,
        ..About::new(name, 1, ranks, drawing, setup)
    };
    about.limit(setup);
    let memory = Memory::Arena(about.arenas[0].clone());
    let micro = MicroBatcher::new(&store, setup.size).memory(memory);
    let micro = match setup.reserve {
        Some(reserve) => micro.reserve(reserve),
        None => micro,
    };
    let micro = setup.remember.iter().fold(micro, MicroBatcher::remember);
    let micro = micro.join(&setup.world).expect("one model");
    Box::new(OneDevice { store, model, micro, about })
}

impl Engine for OneDevice {
    fn about(&self) -> &About {
        &self.about
    }

    fn backward(&mut self, batch: &Samples, loss: &LossFn) -> Result<StepReport> {
        let part = self.about.own_rows(batch);
        let Self { micro, model, .. } = self;
        micro.backward(&part, |(x, y): Samples| loss(&model.forward_t(&x, true), &y))
    }

    fn backward_whole(&mut self, batch: &Samples, loss: WholeLoss) -> Result<WholeStep> {
        let Self { micro, model, .. } = self;
        let step = micro.backward_whole(&batch.0, |x: Tensor| model.forward_t(&x, true), loss)?;
        Ok(WholeStep::of(&step, &step.outputs))
    }

    fn accumulate(&mut self, batch: &Samples, loss: &LossFn) -> Result<()> {
        let part = self.about.own_rows(batch);
        if samples(&part) == 0 {
            return Ok(());
        }
        let Self { micro, model, .. } = self;
        micro.accumulate(&part, |(x, y): Samples| loss(&model.forward_t(&x, true), &y))
    }

    fn commit(&mut self) -> Result<StepReport> {
        self.micro.commit()
    }

    fn evaluate(&mut self, batch: &Samples, loss: &LossFn) -> Result<StepReport<Tensor>> {
        let part = self.about.own_rows(batch);
        let Self { micro, model, .. } = self;
        micro.evaluate(&part, |(x, y): Samples| {
            let out = model.forward_t(&x, false);
            Ok::<_, String>((loss(&out, &y)?, out))
        })
    }

    fn variables(&self) -> Named {
        variables(&self.store)
    }

    fn gradients(&self) -> Named {
        gradients(&self.store)
    }

    fn set_variables(&mut self, values: &Named) {
        set_values(&self.store, values);
    }

    fn zero_grad(&mut self) {
        clear(&self.store);
    }
}

/// Two replicas, alone or in each rank.
struct Replicated {
    replicas: Replicas<Model>,
    about: About,
}

pub fn replicas(setup: &Setup) -> Box<dyn Engine> {
    let (rank, ranks) = (setup.world.rank(), setup.world.size());
    let about = About {
        own: 2 * rank..2 * rank + 2,
        accumulates_apart: ranks > 1,
        has_whole: ranks == 1,
        ..About::new("replicas", 2, 2 * ranks, Drawing::ByPart, setup)
    };
    let layers = setup.layers;
    let build =
        move |root: &tch::nn::Path| layers(BatchNormPolicy::Deferred).build(root).expect("built");
    let mut replicas = Replicas::new(about.devices(), setup.size, build).expect("replicas");
    // Measured speeds would vary the parts from run to run.
    replicas.set_speeds(&[1.0, 1.0]).expect("speeds");
    replicas.store_mut().set_kind(Kind::Double);
    let mut replicas = match setup.reserve {
        Some(reserve) => replicas.reserve(reserve),
        None => replicas,
    };
    // The second replica copies the first one's values, and their dtype, before it runs.
    let x = Tensor::zeros([2, 4], (Kind::Double, Device::Cpu));
    let _outputs =
        replicas.map(&x, |model, x: Tensor| model.forward_t(&x, false)).expect("outputs");
    about.limit(setup);
    let replicas = match &setup.remember {
        Some(path) => replicas.remember(path),
        None => replicas,
    };
    let replicas = replicas.join(&setup.world).expect("one model");
    Box::new(Replicated { replicas, about })
}

impl Engine for Replicated {
    fn about(&self) -> &About {
        &self.about
    }

    fn backward(&mut self, batch: &Samples, loss: &LossFn) -> Result<StepReport> {
        let (part, loss) = (self.about.own_rows(batch), Arc::clone(loss));
        self.replicas
            .backward(&part, move |model, (x, y): Samples| loss(&model.forward_t(&x, true), &y))
    }

    fn backward_whole(&mut self, batch: &Samples, loss: WholeLoss) -> Result<WholeStep> {
        let forward = |model: &Model, x: Tensor| model.forward_t(&x, true);
        let step =
            self.replicas.backward_whole(&batch.0, forward, move |_, out: &Tensor| loss(out))?;
        Ok(WholeStep::of(&step, &step.outputs))
    }

    fn accumulate(&mut self, batch: &Samples, loss: &LossFn) -> Result<()> {
        let (part, loss) = (self.about.own_rows(batch), Arc::clone(loss));
        if samples(&part) == 0 {
            return Ok(());
        }
        self.replicas
            .accumulate(&part, move |model, (x, y): Samples| loss(&model.forward_t(&x, true), &y))
    }

    fn commit(&mut self) -> Result<StepReport> {
        self.replicas.commit()
    }

    fn evaluate(&mut self, batch: &Samples, loss: &LossFn) -> Result<StepReport<Tensor>> {
        let (part, loss) = (self.about.own_rows(batch), Arc::clone(loss));
        self.replicas.evaluate(&part, move |model, (x, y): Samples| {
            let out = model.forward_t(&x, false);
            Ok::<_, String>((loss(&out, &y)?, out))
        })
    }

    fn variables(&self) -> Named {
        variables(self.replicas.store())
    }

    fn gradients(&self) -> Named {
        gradients(self.replicas.store())
    }

    fn set_variables(&mut self, values: &Named) {
        set_values(self.replicas.store(), values);
    }

    fn zero_grad(&mut self) {
        clear(self.replicas.store());
    }
}

/// Pipeline of two stages, in one process or with a stage in each rank; or two such pipelines.
struct Piped {
    pipe: Pipeline,
    about: About,
}

pub fn pipeline(setup: &Setup) -> Box<dyn Engine> {
    let ranks = setup.world.size();
    let name = if ranks == 1 { "a pipeline" } else { "a pipeline over ranks" };
    piped(setup, Pipeline::builder(setup.usual_layers()), about_piped(name, 2 / ranks, setup))
}

pub fn replicated_pipeline(setup: &Setup) -> Box<dyn Engine> {
    let about = About { parts: 2, own: 0..2, ..about_piped("two pipelines", 4, setup) };
    piped(setup, Pipeline::builder(setup.usual_layers()), about)
}

/// Pipeline with split backwards.
pub fn split_pipeline(setup: &Setup) -> Box<dyn Engine> {
    let builder = Pipeline::builder(setup.usual_layers()).schedule(Schedule::ZeroBubbleH1);
    piped(setup, builder, about_piped("a split pipeline", 2 / setup.world.size(), setup))
}

/// Pipeline over two devices with the named schedule of this number; recompute modes take turns.
pub fn named<const NUMBER: usize>(setup: &Setup) -> Box<dyn Engine> {
    let (schedule, recompute) = (Schedule::all(2)[NUMBER], Recompute::ALL[NUMBER % 3]);
    let builder = Pipeline::builder(setup.usual_layers()).schedule(schedule).recompute(recompute);
    piped(setup, builder, about_piped(NAMES[NUMBER], 2 / setup.world.size(), setup))
}

const NAMES: [&str; 10] = [
    "gpipe",
    "1f1b",
    "interleaved",
    "breadth first",
    "zero bubble h1",
    "interleaved zero bubble",
    "zero bubble v",
    "an automatic list",
    "an automatic interleaved list",
    "an automatic v",
];

/// One device, with all stages offloaded.
pub fn streamed(setup: &Setup) -> Box<dyn Engine> {
    let schedule = Schedule::BreadthFirst { stages_per_device: 2 };
    let builder = Pipeline::builder(setup.usual_layers()).schedule(schedule).offload(Offload::Host);
    let about = About { is_offloaded: true, ..about_piped("a streamed pipeline", 1, setup) };
    piped(setup, builder, about)
}

/// One device, with a barrier across micro-batches at every BatchNorm.
pub fn exact(setup: &Setup) -> Box<dyn Engine> {
    let name = "a pipeline with exact BatchNorms";
    let about = About { is_exact: true, ..about_piped(name, 1, setup) };
    piped(setup, Pipeline::builder((setup.layers)(BatchNormPolicy::Exact)), about)
}

fn about_piped(name: &'static str, devices: usize, setup: &Setup) -> About {
    About::new(name, devices, 1, Drawing::ByLayer, setup)
}

fn piped(setup: &Setup, builder: Builder, about: About) -> Box<dyn Engine> {
    let builder = builder.devices(about.devices()).replicas(about.parts).world(&setup.world);
    let builder = builder.micro_batches(setup.size).kind(Kind::Double);
    let builder = match setup.reserve {
        Some(reserve) => builder.reserve(reserve),
        None => builder,
    };
    let builder = setup.remember.iter().fold(builder, Builder::remember);
    let pipe = builder.build().expect("a pipeline");
    about.limit(setup);
    Box::new(Piped { pipe, about })
}

impl Engine for Piped {
    fn about(&self) -> &About {
        &self.about
    }

    fn backward(&mut self, (x, y): &Samples, loss: &LossFn) -> Result<StepReport> {
        let loss = Arc::clone(loss);
        self.pipe.backward(x, y, move |out: Tensor, y: &Target| loss(&out, y))
    }

    fn backward_whole(&mut self, (x, _): &Samples, loss: WholeLoss) -> Result<WholeStep> {
        let step = self.pipe.backward_whole(x, |out| loss(out))?;
        Ok(WholeStep::of(&step, &step.outputs))
    }

    fn accumulate(&mut self, (x, y): &Samples, loss: &LossFn) -> Result<()> {
        let loss = Arc::clone(loss);
        self.pipe.accumulate(x, y, move |out: Tensor, y: &Target| loss(&out, y))
    }

    fn commit(&mut self) -> Result<StepReport> {
        self.pipe.commit()
    }

    fn evaluate(&mut self, (x, y): &Samples, loss: &LossFn) -> Result<StepReport<Tensor>> {
        let loss = Arc::clone(loss);
        self.pipe.evaluate(x, y, move |out: Tensor, y: &Target| {
            Ok::<_, String>((loss(&out, y)?, out.detach()))
        })
    }

    fn variables(&self) -> Named {
        self.pipe.variables().expect("variables")
    }

    fn gradients(&self) -> Named {
        self.pipe.gradients().expect("gradients")
    }

    fn set_variables(&mut self, values: &Named) {
        self.pipe.set_variables(copies(values)).expect("the same model");
    }

    fn zero_grad(&mut self) {
        self.pipe.zero_grad().expect("cleared");
    }
}
