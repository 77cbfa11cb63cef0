//! Every kind of engine, as the promises see it. A new kind implements [`Engine`], and gets a line in
//! [`HERE`] or [`OVER_RANKS`].

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use brimful::layers::Model;
use brimful::memory::{Arena, Memory};
use brimful::nn::BatchNormPolicy;
use brimful::optim::Adam;
use brimful::pipeline::{Builder, Homes};
use brimful::schedule::Schedule;
use brimful::{
    DeviceSpec, Layers, Loss, MicroBatcher, Pipeline, Replicas, Result, Size, Step, World, split,
};
use tch::nn::{ModuleT, VarStore};
use tch::{Device, Kind, Tensor};

use crate::support::{Named, clear, copies, gradients, set_values, variables};

/// What a sample should come to, its tokens, and its number in the mini-batch.
pub type Target = (Tensor, Tensor, Tensor);

/// Inputs and targets.
pub type Samples = (Tensor, Target);

/// A loss of a micro-batch's outputs.
pub type LossFn = Arc<dyn Fn(&Tensor, &Target) -> std::result::Result<Loss, String> + Send + Sync>;

/// A loss of all outputs.
pub type WholeLoss = fn(&Tensor) -> Tensor;

/// What a step on all outputs says.
pub struct WholeStep {
    pub loss: f64,
    pub terms: Vec<f64>,
    pub seed: Option<u64>,
    pub outputs: Tensor,
}

impl WholeStep {
    fn of<O>(step: &Step<O>, outputs: &Tensor) -> Self {
        let (terms, outputs) = (step.terms.clone(), outputs.detach());
        Self { loss: step.loss, terms, seed: step.seed, outputs }
    }
}

/// Makes an engine as it is asked for.
pub type Make = fn(&Setup) -> Box<dyn Engine>;

/// The kinds that need one process.
pub const HERE: &[Make] =
    &[one_device, replicas, pipeline, replicated_pipeline, streamed, split_pipeline, exact];

/// The kinds that are spread over ranks.
pub const OVER_RANKS: &[Make] = &[one_device, pipeline, split_pipeline];

/// Layers with BatchNorms of this policy.
pub type MakeLayers = fn(BatchNormPolicy) -> Layers;

/// What an engine is made of.
pub struct Setup {
    pub layers: MakeLayers,
    pub size: Size,
    /// Bytes of each memory beside what the model takes.
    pub limit: Option<u64>,
    /// Whether memory is kept for Adam's state.
    pub reserve: bool,
    pub remember: Option<PathBuf>,
    pub world: World,
}

impl Setup {
    pub fn new(layers: MakeLayers, size: Size, world: &World) -> Self {
        let world = world.clone();
        Self { layers, size, limit: None, reserve: false, remember: None, world }
    }

    /// The layers as every kind but one takes them.
    fn usual_layers(&self) -> Layers {
        (self.layers)(BatchNormPolicy::Deferred)
    }
}

/// Where the random numbers of a step come from, so that a plain model can draw the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Drawing {
    /// The default generator.
    AsPlainLoop,
    /// A seed for each part and micro-batch of it.
    ByPart,
    /// A seed for each micro-batch of all parts and each layer.
    ByLayer,
}

/// An engine with its model. Mini-batches are given whole; who has a part of them takes it.
pub trait Engine {
    fn name(&self) -> &'static str;
    /// This process's memories.
    fn arenas(&self) -> &[Arena];
    /// How many threads it has.
    fn threads(&self) -> usize;
    /// The parts that a mini-batch is dealt out in, over all ranks.
    fn parts(&self, samples: usize) -> Vec<Range<usize>>;
    /// Which of the parts are this process's.
    fn own(&self) -> Range<usize>;
    fn size(&self) -> Size;
    fn drawing(&self) -> Drawing;
    /// Whether a mini-batch of a window is each rank's own matter until the commit.
    fn accumulates_apart(&self) -> bool {
        false
    }
    /// Whether an optimizer's state is on the host, and takes nothing of the memories.
    fn is_at_home(&self) -> bool {
        false
    }
    /// Whether the whole mini-batch normalises, whatever its cut.
    fn is_exact(&self) -> bool {
        false
    }
    /// Whether it can have a loss of all outputs.
    fn has_whole(&self) -> bool {
        true
    }

    fn backward(&mut self, batch: &Samples, loss: &LossFn) -> Result<Step>;
    fn backward_whole(&mut self, batch: &Samples, loss: WholeLoss) -> Result<WholeStep>;
    fn accumulate(&mut self, batch: &Samples, loss: &LossFn) -> Result<()>;
    fn commit(&mut self) -> Result<Step>;
    /// The loss, and the outputs of this process's parts.
    fn evaluate(&mut self, batch: &Samples, loss: &LossFn) -> Result<Step<Tensor>>;

    /// All variables by name; over ranks, those that this rank can see.
    fn variables(&self) -> Named;
    /// Those of the gradients that are there.
    fn gradients(&self) -> Named;
    fn set_variables(&mut self, values: &Named);
    fn zero_grad(&mut self);
}

/// These rows of a mini-batch.
pub fn rows((x, (y, tokens, number)): &Samples, range: &Range<usize>) -> Samples {
    let rows = |t: &Tensor| t.narrow(0, range.start as i64, range.len() as i64);
    (rows(x), (rows(y), rows(tokens), rows(number)))
}

fn samples((x, _): &Samples) -> usize {
    x.size()[0] as usize
}

/// So many parts, the last of them empty where there are too few samples.
fn dealt(samples: usize, parts: usize) -> Vec<Range<usize>> {
    let mut all = split::by_count(samples, parts).expect("samples");
    all.resize(parts, samples..samples);
    all
}

fn arenas(count: usize) -> Vec<Arena> {
    (0..count).map(|number| Arena::new(&format!("memory {number}"))).collect()
}

fn on_cpus(arenas: &[Arena]) -> impl Iterator<Item = DeviceSpec> {
    arenas.iter().map(|arena| DeviceSpec::cpu().threads(1).arena(arena.clone()))
}

/// The model itself is there already.
fn limit(arenas: &[Arena], setup: &Setup) {
    for arena in arenas {
        arena.set_limit(setup.limit.map(|bytes| arena.current() + bytes)).expect("a limit");
    }
}

/// A `MicroBatcher`, alone or in each rank.
struct OneDevice {
    store: VarStore,
    model: Model,
    micro: MicroBatcher,
    arena: [Arena; 1],
    world: World,
}

pub fn one_device(setup: &Setup) -> Box<dyn Engine> {
    let mut store = VarStore::new(Device::Cpu);
    let model = setup.usual_layers().build(&store.root()).expect("built");
    store.set_kind(Kind::Double);
    let arena = [Arena::new("memory 0")];
    limit(&arena, setup);
    let mut micro = MicroBatcher::new(&store, setup.size).memory(Memory::Arena(arena[0].clone()));
    if setup.reserve {
        micro = micro.reserve(Adam::new(0.1));
    }
    if let Some(path) = &setup.remember {
        micro = micro.remember(path);
    }
    let micro = micro.world(&setup.world).expect("one model");
    Box::new(OneDevice { store, model, micro, arena, world: setup.world.clone() })
}

impl OneDevice {
    fn part(&self, batch: &Samples) -> Samples {
        rows(batch, &self.parts(samples(batch))[self.world.rank()])
    }
}

impl Engine for OneDevice {
    fn name(&self) -> &'static str {
        if self.world.size() == 1 { "one device" } else { "one device in each rank" }
    }

    fn arenas(&self) -> &[Arena] {
        &self.arena
    }

    fn threads(&self) -> usize {
        0
    }

    fn parts(&self, samples: usize) -> Vec<Range<usize>> {
        dealt(samples, self.world.size())
    }

    fn own(&self) -> Range<usize> {
        self.world.rank()..self.world.rank() + 1
    }

    fn size(&self) -> Size {
        self.micro.size()
    }

    fn drawing(&self) -> Drawing {
        if self.world.size() == 1 { Drawing::AsPlainLoop } else { Drawing::ByPart }
    }

    fn accumulates_apart(&self) -> bool {
        self.world.size() > 1
    }

    fn has_whole(&self) -> bool {
        self.world.size() == 1
    }

    fn backward(&mut self, batch: &Samples, loss: &LossFn) -> Result<Step> {
        let part = self.part(batch);
        let Self { micro, model, .. } = self;
        micro.backward(&part, |(x, y): Samples| loss(&model.forward_t(&x, true), &y))
    }

    fn backward_whole(&mut self, batch: &Samples, loss: WholeLoss) -> Result<WholeStep> {
        let Self { micro, model, .. } = self;
        let step = micro.backward_whole(&batch.0, |x: Tensor| model.forward_t(&x, true), loss)?;
        Ok(WholeStep::of(&step, &step.outputs))
    }

    fn accumulate(&mut self, batch: &Samples, loss: &LossFn) -> Result<()> {
        let part = self.part(batch);
        if samples(&part) == 0 {
            return Ok(());
        }
        let Self { micro, model, .. } = self;
        micro.accumulate(&part, |(x, y): Samples| loss(&model.forward_t(&x, true), &y))
    }

    fn commit(&mut self) -> Result<Step> {
        self.micro.commit()
    }

    fn evaluate(&mut self, batch: &Samples, loss: &LossFn) -> Result<Step<Tensor>> {
        let part = self.part(batch);
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

/// Two replicas.
struct Replicated {
    replicas: Replicas<Model>,
    arenas: Vec<Arena>,
}

pub fn replicas(setup: &Setup) -> Box<dyn Engine> {
    let arenas = arenas(2);
    let layers = setup.layers;
    let build =
        move |root: &tch::nn::Path| layers(BatchNormPolicy::Deferred).build(root).expect("built");
    let replicas = Replicas::new(on_cpus(&arenas), setup.size, build).expect("replicas");
    // What is measured would cut mini-batches otherwise each time.
    let mut replicas = replicas.speeds(&[1.0, 1.0]).expect("speeds");
    replicas.store_mut().set_kind(Kind::Double);
    if setup.reserve {
        replicas = replicas.reserve(Adam::new(0.1));
    }
    if let Some(path) = &setup.remember {
        replicas = replicas.remember(path);
    }
    // The second takes over the first one's numbers, and their kind, before it runs.
    let x = Tensor::zeros([2, 4], (Kind::Double, Device::Cpu));
    let _outputs =
        replicas.map(&x, |model, x: Tensor| model.forward_t(&x, false)).expect("outputs");
    limit(&arenas, setup);
    Box::new(Replicated { replicas, arenas })
}

impl Engine for Replicated {
    fn name(&self) -> &'static str {
        "replicas"
    }

    fn arenas(&self) -> &[Arena] {
        &self.arenas
    }

    fn threads(&self) -> usize {
        2
    }

    fn parts(&self, samples: usize) -> Vec<Range<usize>> {
        dealt(samples, 2)
    }

    fn own(&self) -> Range<usize> {
        0..2
    }

    fn size(&self) -> Size {
        self.replicas.size()
    }

    fn drawing(&self) -> Drawing {
        Drawing::ByPart
    }

    fn backward(&mut self, batch: &Samples, loss: &LossFn) -> Result<Step> {
        let loss = Arc::clone(loss);
        self.replicas
            .backward(batch, move |model, (x, y): Samples| loss(&model.forward_t(&x, true), &y))
    }

    fn backward_whole(&mut self, batch: &Samples, loss: WholeLoss) -> Result<WholeStep> {
        let forward = |model: &Model, x: Tensor| model.forward_t(&x, true);
        let step =
            self.replicas.backward_whole(&batch.0, forward, move |_, out: &Tensor| loss(out))?;
        Ok(WholeStep::of(&step, &step.outputs))
    }

    fn accumulate(&mut self, batch: &Samples, loss: &LossFn) -> Result<()> {
        let loss = Arc::clone(loss);
        self.replicas
            .accumulate(batch, move |model, (x, y): Samples| loss(&model.forward_t(&x, true), &y))
    }

    fn commit(&mut self) -> Result<Step> {
        self.replicas.commit()
    }

    fn evaluate(&mut self, batch: &Samples, loss: &LossFn) -> Result<Step<Tensor>> {
        let loss = Arc::clone(loss);
        self.replicas.evaluate(batch, move |model, (x, y): Samples| {
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

/// A pipeline of two stages, in one process or with one of them in each rank; or two such pipelines.
struct Piped {
    pipe: Pipeline,
    arenas: Vec<Arena>,
    name: &'static str,
    replicas: usize,
}

pub fn pipeline(setup: &Setup) -> Box<dyn Engine> {
    piped(setup, 2 / setup.world.size(), 1)
}

pub fn replicated_pipeline(setup: &Setup) -> Box<dyn Engine> {
    piped(setup, 4, 2)
}

/// With backwards in two halves.
pub fn split_pipeline(setup: &Setup) -> Box<dyn Engine> {
    let arenas = arenas(2 / setup.world.size());
    let builder = Pipeline::builder(setup.usual_layers()).schedule(Schedule::ZeroBubbleH1);
    built(setup, builder.devices(on_cpus(&arenas)), arenas, "a split pipeline", 1)
}

const STREAMED: &str = "a streamed pipeline";

/// One device, and every stage at home on the host.
pub fn streamed(setup: &Setup) -> Box<dyn Engine> {
    let arenas = arenas(1);
    let schedule = Schedule::BreadthFirst { stages_per_device: 2 };
    let builder = Pipeline::builder(setup.usual_layers()).schedule(schedule).homes(Homes::Host);
    built(setup, builder.devices(on_cpus(&arenas)), arenas, STREAMED, 1)
}

const EXACT: &str = "a pipeline with exact BatchNorms";

/// One device, on which all micro-batches meet at every BatchNorm.
pub fn exact(setup: &Setup) -> Box<dyn Engine> {
    let arenas = arenas(1);
    let builder = Pipeline::builder((setup.layers)(BatchNormPolicy::Exact));
    built(setup, builder.devices(on_cpus(&arenas)), arenas, EXACT, 1)
}

fn piped(setup: &Setup, devices: usize, replicas: usize) -> Box<dyn Engine> {
    let arenas = arenas(devices);
    let builder = Pipeline::builder(setup.usual_layers()).devices(on_cpus(&arenas));
    let name = match (setup.world.size(), replicas) {
        (1, 1) => "a pipeline",
        (1, _) => "two pipelines",
        _ => "a pipeline over ranks",
    };
    built(setup, builder, arenas, name, replicas)
}

fn built(
    setup: &Setup,
    builder: Builder,
    arenas: Vec<Arena>,
    name: &'static str,
    replicas: usize,
) -> Box<dyn Engine> {
    let mut builder =
        builder.replicas(replicas).world(&setup.world).micro_batches(setup.size).kind(Kind::Double);
    if setup.reserve {
        builder = builder.reserve(Adam::new(0.1));
    }
    if let Some(path) = &setup.remember {
        builder = builder.remember(path);
    }
    let pipe = builder.build().expect("a pipeline");
    limit(&arenas, setup);
    Box::new(Piped { pipe, arenas, name, replicas })
}

impl Engine for Piped {
    fn name(&self) -> &'static str {
        self.name
    }

    fn is_at_home(&self) -> bool {
        self.name == STREAMED
    }

    fn is_exact(&self) -> bool {
        self.name == EXACT
    }

    fn arenas(&self) -> &[Arena] {
        &self.arenas
    }

    fn threads(&self) -> usize {
        self.arenas.len()
    }

    fn parts(&self, samples: usize) -> Vec<Range<usize>> {
        dealt(samples, self.replicas)
    }

    fn own(&self) -> Range<usize> {
        0..self.replicas
    }

    fn size(&self) -> Size {
        self.pipe.size()
    }

    fn drawing(&self) -> Drawing {
        Drawing::ByLayer
    }

    fn backward(&mut self, (x, y): &Samples, loss: &LossFn) -> Result<Step> {
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

    fn commit(&mut self) -> Result<Step> {
        self.pipe.commit()
    }

    fn evaluate(&mut self, (x, y): &Samples, loss: &LossFn) -> Result<Step<Tensor>> {
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
