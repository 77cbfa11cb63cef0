//! Uniform interface to every engine: builds them from a drawn case, and runs the script's operations.

use std::path::Path;
use std::sync::Arc;

use brimful::layers::Model as BuiltModel;
use brimful::memory::{Arena, Memory};
use brimful::optim::{Adafactor, AdamW, Method, Muon, Optimizer, Sgd, StateFormat};
use brimful::pipeline::Offload;
use brimful::save::{self, Metadata};
use brimful::schedule::{Actions, Location, Recompute, Schedule};
use brimful::{
    Bytes, DeviceSpec, Loss, MicroBatcher, MicroBatches, NonFinitePolicy, Pipeline, Replicas,
    Result, StepReport, World,
};
use brimful_torch::random::{generator_state, set_generator_state};
use proptest::prelude::*;
use tch::nn::{ModuleT, VarStore};
use tch::{Device, Kind, Tensor};

use crate::model::{Model, Samples, Target};
use crate::plain::{DECAY, LEAST_NORM, LEAST_ROOT, LEAST_SIZE, LEAST_SQUARE, MOMENTUM, Updates};
use crate::support::{Named, clear, gradients, test_device, variables};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    Fixed(usize),
    Count(usize),
    Auto,
    Largest,
}

impl Cut {
    pub fn size(self) -> MicroBatches {
        match self {
            Self::Fixed(size) => MicroBatches::Samples(size),
            Self::Count(count) => MicroBatches::Count(count),
            Self::Auto => MicroBatches::Auto,
            Self::Largest => MicroBatches::Largest,
        }
    }

    /// Returns the number of micro-batches, or a usual one if it depends on the mini-batch.
    fn usual_count(self) -> usize {
        if let Self::Count(count) = self { count } else { 4 }
    }

    pub fn is_automatic(self) -> bool {
        matches!(self, Self::Auto | Self::Largest)
    }
}

pub fn cut() -> impl Strategy<Value = Cut> {
    prop_oneof![
        4 => (1usize..5).prop_map(Cut::Fixed),
        4 => (1usize..5).prop_map(Cut::Count),
        1 => Just(Cut::Auto),
        1 => Just(Cut::Largest),
    ]
}

/// Memory that automatic offload plans for: less than what some drawn models need.
const PLANNED_BYTES: Bytes = Bytes(1_500);

/// Index in [`Schedule::all`].
const BREADTH_FIRST: usize = 3;

/// Placement of the stages' weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Living {
    OnDevices,
    OnHost,
    /// Every other stage.
    Mixed,
    /// As planned for small devices, or all on the host if no plan can be made.
    Planned(Given),
}

/// Settings that a plan for offload has to keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Given {
    Nothing,
    Schedule,
    /// Uneven, with the schedule.
    Balance,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Engine {
    Micro,
    Replicas {
        count: usize,
    },
    Pipeline {
        devices: usize,
        /// Index in [`Schedule::all`].
        schedule: usize,
        stages_per_device: usize,
        /// Index in [`Recompute::ALL`].
        recompute: usize,
        living: Living,
        replicas: usize,
        /// True for optimizer in the backward, if all stages are offloaded.
        updates_in_backward: bool,
        /// Custom list of actions: the schedule's with this recompute, in an order drawn by a seed.
        own_list: Option<(usize, u8)>,
    },
}

pub fn engine() -> impl Strategy<Value = Engine> {
    let living = prop_oneof![
        3 => Just(Living::OnDevices),
        2 => Just(Living::OnHost),
        1 => Just(Living::Mixed),
        1 => Just(Living::Planned(Given::Nothing)),
        1 => prop_oneof![Just(Given::Schedule), Just(Given::Balance)].prop_map(Living::Planned),
    ];
    // Most custom lists run without recompute, because graphs that are kept are more error-prone.
    let kept = prop_oneof![2 => Just(0usize), 1 => 0usize..3];
    let own_list = prop_oneof![1 => Just(None), 1 => (kept, any::<u8>()).prop_map(Some)];
    // Breadth first is drawn more often, because most offloaded stages run in that order.
    let schedule = prop_oneof![3 => 0usize..10, 1 => Just(BREADTH_FIRST)];
    let replicas = prop_oneof![3 => Just(1), 1 => Just(2)];
    let updates_in_backward = prop::bool::weighted(0.5);
    let pipeline = (
        1usize..4,
        schedule,
        1usize..5,
        0usize..3,
        living,
        replicas,
        updates_in_backward,
        own_list,
    );
    let pipeline = pipeline.prop_map(
        |(
            devices,
            schedule,
            stages_per_device,
            recompute,
            living,
            replicas,
            updates_in_backward,
            own_list,
        )| {
            Engine::Pipeline {
                devices,
                schedule,
                stages_per_device,
                recompute,
                living,
                replicas,
                updates_in_backward,
                own_list,
            }
        },
    );
    prop_oneof![
        2 => Just(Engine::Micro),
        1 => (1usize..4).prop_map(|count| Engine::Replicas { count }),
        4 => pipeline,
    ]
}

/// Result of a call.
pub struct Reported {
    /// NaN if there is none.
    pub loss: f64,
    pub outputs: Tensor,
    pub sizes: Vec<usize>,
    pub shares: Vec<usize>,
    pub seed: Option<u64>,
}

impl Reported {
    fn of<O>(step: &StepReport<O>, outputs: &Tensor) -> Self {
        let StepReport { loss, seed, .. } = *step;
        let (sizes, shares) = (step.sizes.clone(), step.shares.clone());
        // A rank without a sample has none.
        let outputs = match outputs.defined() {
            true => outputs.shallow_clone(),
            false => Tensor::zeros([0], (Kind::Double, Device::Cpu)),
        };
        assert!(!outputs.requires_grad(), "outputs with a graph");
        Self { loss, outputs, sizes, shares, seed }
    }
}

/// Loss of a micro-batch's outputs.
pub type LossFn = Arc<dyn Fn(&Tensor, &Target) -> Loss + Send + Sync>;

/// Loss of all outputs.
pub type WholeFn = Arc<dyn Fn(&Tensor) -> Tensor + Send + Sync>;

pub trait Subject {
    /// Returns the number of replicas over which a mini-batch is spread, over all ranks.
    fn parts(&self) -> usize;
    /// Returns whether a step has its own seed.
    fn is_seeded(&self) -> bool;
    /// Returns whether layers, rather than parts, have seeds.
    fn draws_by_layer(&self) -> bool;
    fn arenas(&self) -> &[Arena];
    fn backward(&mut self, batch: &Samples, loss: &LossFn) -> Result<Reported>;
    fn accumulate(&mut self, batch: &Samples, loss: &LossFn) -> Result<Tensor>;
    fn commit(&mut self) -> Result<Reported>;
    fn whole(&mut self, batch: &Samples, loss: &WholeFn) -> Result<Reported>;
    /// As [`Subject::whole`], in two calls around the caller's backward where the engine has such.
    fn whole_in_two(&mut self, batch: &Samples, loss: &WholeFn) -> Result<Reported> {
        self.whole(batch, loss)
    }
    fn evaluate(&mut self, batch: &Samples, loss: &LossFn) -> Result<Reported>;
    fn map(&mut self, batch: &Samples) -> Result<Tensor>;
    fn set_size(&mut self, cut: Cut) -> Result<()>;
    fn optimizer(&mut self) -> &mut Optimizer;
    fn zero_grad(&mut self) -> Result<()>;
    fn set_frozen(&mut self, name: &str, frozen: bool) -> Result<()>;
    fn variables(&self) -> Named;
    fn gradients(&self) -> Named;
    fn save(&self, folder: &Path) -> Result<()>;
    fn load(&mut self, folder: &Path) -> Result<()>;
    /// Returns whether a backward updates parameters and leaves no gradients.
    fn updates_in_backward(&self) -> bool {
        false
    }
    /// Returns the head that is a leaf of the loss.
    fn head(&self) -> Option<Tensor> {
        None
    }
    /// Returns whether leaves of a whole-batch loss get gradients.
    fn sums_other_leaves(&self) -> bool;
}

pub struct Setup<'a> {
    pub model: &'a Model,
    pub cut: Cut,
    pub kind: Kind,
    pub rate: f64,
    pub updates: Updates,
    pub world: &'a World,
    /// True to refuse non-finite gradients too.
    pub strict: bool,
    /// True to add a head's cross-entropy as a further term of the loss.
    pub head: bool,
}

impl Setup<'_> {
    fn method(&self) -> Method {
        let sgd = Sgd::new(self.rate).momentum(MOMENTUM);
        match self.updates {
            Updates::Sgd => sgd.into(),
            Updates::SgdBf16 => sgd.state_format(StateFormat::Bf16).into(),
            Updates::SgdEightBit => sgd.state_format(StateFormat::EightBit).into(),
            Updates::Adafactor => Adafactor::new(self.rate).eps(LEAST_SQUARE, LEAST_SIZE).into(),
            Updates::AdamW => AdamW::new(self.rate).eps(LEAST_ROOT).weight_decay(DECAY).into(),
            Updates::Muon => Muon::new(self.rate).eps(LEAST_NORM).into(),
        }
    }

    fn non_finite(&self) -> NonFinitePolicy {
        if self.strict { NonFinitePolicy::RefuseGradients } else { NonFinitePolicy::RefuseLoss }
    }
}

impl Engine {
    /// Returns the engine for several ranks: pipelines are spread over them, or are replicas of each other.
    pub fn over_ranks(&self, layers: usize, ranks: usize) -> Self {
        match self {
            Self::Pipeline { replicas, .. } if layers >= ranks || *replicas > 1 => self.clone(),
            _ => Self::Micro,
        }
    }

    /// Returns whether every stage runs its micro-batches one after the other, in the plain loop's order.
    pub fn runs_in_order(&self) -> bool {
        match self {
            Self::Pipeline { recompute, living, own_list, .. } => {
                *recompute == 0 && *living == Living::OnDevices && own_list.is_none()
            }
            _ => true,
        }
    }

    pub fn build(&self, setup: &Setup<'_>) -> Result<Box<dyn Subject>> {
        match self {
            Self::Micro => OneDevice::build(setup),
            Self::Replicas { count } => Replicated::build(*count, setup),
            Self::Pipeline { .. } => Piped::build(self, setup),
        }
    }
}

fn arena(number: usize) -> Arena {
    Arena::new(&format!("memory {number}"))
}

fn device(number: usize, arenas: &[Arena]) -> DeviceSpec {
    match test_device() {
        Device::Cpu => DeviceSpec::cpu().threads(1).arena(arenas[number].clone()),
        there => DeviceSpec::from(there),
    }
}

type Pair = (Tensor, Target);

fn pair(batch: &Samples) -> Pair {
    let (y, weight, number) = &batch.target;
    let target = (y.shallow_clone(), weight.shallow_clone(), number.shallow_clone());
    (batch.x.shallow_clone(), target)
}

fn save_all(folder: &Path, named: &Named) -> Result<()> {
    save::write(folder.join("model.safetensors"), named, &Metadata::new())
}

fn load_all(folder: &Path, store: &VarStore) -> Result<()> {
    let (values, _) = save::read(folder.join("model.safetensors"))?;
    crate::support::set_values(store, &values);
    Ok(())
}

fn set_trained(store: &VarStore, name: &str, trained: bool) {
    let variable = store.variables()[name].shallow_clone();
    let _itself = variable.set_requires_grad(trained);
}

/// A `MicroBatcher`, alone or in each rank.
struct OneDevice {
    store: VarStore,
    model: BuiltModel,
    head: Option<Tensor>,
    micro: MicroBatcher,
    optimizer: Optimizer,
    arenas: Vec<Arena>,
    world: World,
}

impl OneDevice {
    fn build(setup: &Setup<'_>) -> Result<Box<dyn Subject>> {
        let mut store = VarStore::new(test_device());
        let model = setup.model.layers().build(&store.root())?;
        let size = [crate::model::CLASSES, crate::model::WIDTH];
        let head = setup.head.then(|| store.root().randn("head", &size, 0.0, 1.0));
        store.set_kind(setup.kind);
        let arenas = vec![arena(0)];
        let mut micro = MicroBatcher::new(&store, setup.cut.size());
        if test_device() == Device::Cpu {
            micro = micro.memory(Memory::Arena(arenas[0].clone()));
        }
        let graphs = std::env::var_os("BRIMFUL_TEST_CUDA_GRAPHS").is_some();
        let micro = micro.cuda_graphs(graphs).non_finite(setup.non_finite()).join(setup.world)?;
        let optimizer = Optimizer::new(&store, setup.method())?;
        let world = setup.world.clone();
        Ok(Box::new(Self { store, model, head, micro, optimizer, arenas, world }))
    }

    fn own(&self, batch: &Samples) -> Pair {
        let part = crate::script::dealt(batch.len(), self.world.size())[self.world.rank()].clone();
        pair(&batch.rows(part.start, part.len()))
    }
}

impl Subject for OneDevice {
    fn parts(&self) -> usize {
        self.world.size()
    }

    fn is_seeded(&self) -> bool {
        self.world.size() > 1
    }

    fn draws_by_layer(&self) -> bool {
        false
    }

    fn arenas(&self) -> &[Arena] {
        &self.arenas
    }

    fn backward(&mut self, batch: &Samples, loss: &LossFn) -> Result<Reported> {
        let batch = self.own(batch);
        let Self { micro, model, .. } = self;
        let step = micro.backward(&batch, |(x, y): Pair| {
            let out = model.forward_t(&x, true);
            (loss(&out, &y), out)
        })?;
        Ok(Reported::of(&step, &step.outputs))
    }

    fn accumulate(&mut self, batch: &Samples, loss: &LossFn) -> Result<Tensor> {
        let batch = self.own(batch);
        if batch.0.size()[0] == 0 {
            return Ok(batch.0);
        }
        let Self { micro, model, .. } = self;
        micro.accumulate(&batch, |(x, y): Pair| {
            let out = model.forward_t(&x, true);
            (loss(&out, &y), out)
        })
    }

    fn commit(&mut self) -> Result<Reported> {
        let step = self.micro.commit()?;
        Ok(Reported::of(&step, &Tensor::zeros([0], (Kind::Double, Device::Cpu))))
    }

    fn whole(&mut self, batch: &Samples, loss: &WholeFn) -> Result<Reported> {
        let Self { micro, model, .. } = self;
        let forward = |x: Tensor| model.forward_t(&x, true);
        let step = micro.backward_whole(&batch.x, forward, |out: &Tensor| loss(out))?;
        Ok(Reported::of(&step, &step.outputs))
    }

    fn evaluate(&mut self, batch: &Samples, loss: &LossFn) -> Result<Reported> {
        let batch = self.own(batch);
        let Self { micro, model, .. } = self;
        let step = micro.evaluate(&batch, |(x, y): Pair| {
            let out = model.forward_t(&x, false);
            (loss(&out, &y), out)
        })?;
        Ok(Reported::of(&step, &step.outputs))
    }

    fn map(&mut self, batch: &Samples) -> Result<Tensor> {
        let (x, _) = self.own(batch);
        if x.size()[0] == 0 {
            return Ok(x);
        }
        let Self { micro, model, .. } = self;
        micro.map(&x, |x| model.forward_t(&x, false))
    }

    fn set_size(&mut self, cut: Cut) -> Result<()> {
        self.micro.set_micro_batches(cut.size());
        Ok(())
    }

    fn optimizer(&mut self) -> &mut Optimizer {
        &mut self.optimizer
    }

    fn zero_grad(&mut self) -> Result<()> {
        clear(&self.store);
        Ok(())
    }

    fn set_frozen(&mut self, name: &str, frozen: bool) -> Result<()> {
        set_trained(&self.store, name, !frozen);
        Ok(())
    }

    fn variables(&self) -> Named {
        variables(&self.store)
    }

    fn gradients(&self) -> Named {
        gradients(&self.store)
    }

    fn save(&self, folder: &Path) -> Result<()> {
        save_all(folder, &self.variables())?;
        self.optimizer.save(folder.join("optimizer.safetensors"))
    }

    fn load(&mut self, folder: &Path) -> Result<()> {
        load_all(folder, &self.store)?;
        self.optimizer.load(folder.join("optimizer.safetensors"))
    }

    fn head(&self) -> Option<Tensor> {
        self.head.as_ref().map(Tensor::shallow_clone)
    }

    fn sums_other_leaves(&self) -> bool {
        self.world.size() == 1
    }
}

struct Replicated {
    replicas: Replicas<BuiltModel>,
    optimizer: Optimizer,
    arenas: Vec<Arena>,
}

impl Replicated {
    fn build(count: usize, setup: &Setup<'_>) -> Result<Box<dyn Subject>> {
        let arenas: Vec<Arena> = (0..count).map(arena).collect();
        // An accelerator is used once: the other devices are CPUs.
        let devices = (0..count).map(|number| match number {
            0 => device(0, &arenas),
            _ => DeviceSpec::cpu().threads(1).arena(arenas[number].clone()),
        });
        let layers = setup.model.layers();
        let build = move |root: &tch::nn::Path| layers.build(root).expect("built");
        let replicas = Replicas::new(devices, setup.cut.size(), build)?;
        let mut replicas = replicas.non_finite(setup.non_finite());
        replicas.set_speeds(&vec![1.0; count])?;
        replicas.store_mut().set_kind(setup.kind);
        let optimizer = Optimizer::new(replicas.store(), setup.method())?;
        Ok(Box::new(Self { replicas, optimizer, arenas }))
    }
}

impl Subject for Replicated {
    fn parts(&self) -> usize {
        self.replicas.len()
    }

    fn is_seeded(&self) -> bool {
        true
    }

    fn draws_by_layer(&self) -> bool {
        false
    }

    fn arenas(&self) -> &[Arena] {
        &self.arenas
    }

    fn backward(&mut self, batch: &Samples, loss: &LossFn) -> Result<Reported> {
        let loss = Arc::clone(loss);
        let step = self.replicas.backward(&pair(batch), move |model, (x, y): Pair| {
            let out = model.forward_t(&x, true);
            (loss(&out, &y), out)
        })?;
        Ok(Reported::of(&step, &step.outputs))
    }

    fn accumulate(&mut self, batch: &Samples, loss: &LossFn) -> Result<Tensor> {
        let loss = Arc::clone(loss);
        self.replicas.accumulate(&pair(batch), move |model, (x, y): Pair| {
            let out = model.forward_t(&x, true);
            (loss(&out, &y), out)
        })
    }

    fn commit(&mut self) -> Result<Reported> {
        let step = self.replicas.commit()?;
        Ok(Reported::of(&step, &Tensor::zeros([0], (Kind::Double, Device::Cpu))))
    }

    fn whole(&mut self, batch: &Samples, loss: &WholeFn) -> Result<Reported> {
        let loss = Arc::clone(loss);
        let forward = |model: &BuiltModel, x: Tensor| model.forward_t(&x, true);
        let step =
            self.replicas.backward_whole(&batch.x, forward, move |_, out: &Tensor| loss(out))?;
        Ok(Reported::of(&step, &step.outputs))
    }

    fn evaluate(&mut self, batch: &Samples, loss: &LossFn) -> Result<Reported> {
        let loss = Arc::clone(loss);
        let step = self.replicas.evaluate(&pair(batch), move |model, (x, y): Pair| {
            let out = model.forward_t(&x, false);
            (loss(&out, &y), out)
        })?;
        Ok(Reported::of(&step, &step.outputs))
    }

    fn map(&mut self, batch: &Samples) -> Result<Tensor> {
        self.replicas.map(&batch.x, |model, x: Tensor| model.forward_t(&x, false))
    }

    fn set_size(&mut self, cut: Cut) -> Result<()> {
        self.replicas.set_micro_batches(cut.size());
        Ok(())
    }

    fn optimizer(&mut self) -> &mut Optimizer {
        &mut self.optimizer
    }

    fn zero_grad(&mut self) -> Result<()> {
        clear(self.replicas.store());
        Ok(())
    }

    fn set_frozen(&mut self, name: &str, frozen: bool) -> Result<()> {
        set_trained(self.replicas.store(), name, !frozen);
        Ok(())
    }

    fn variables(&self) -> Named {
        variables(self.replicas.store())
    }

    fn gradients(&self) -> Named {
        gradients(self.replicas.store())
    }

    fn save(&self, folder: &Path) -> Result<()> {
        save_all(folder, &self.variables())?;
        self.optimizer.save(folder.join("optimizer.safetensors"))
    }

    fn load(&mut self, folder: &Path) -> Result<()> {
        load_all(folder, self.replicas.store())?;
        self.optimizer.load(folder.join("optimizer.safetensors"))
    }

    fn sums_other_leaves(&self) -> bool {
        false
    }
}

struct Piped {
    pipe: Pipeline,
    optimizer: Optimizer,
    arenas: Vec<Arena>,
    parts: usize,
    /// World whose ranks' replicas determine the rows of a mini-batch that this rank provides.
    world: World,
    /// True if ranks are replicas, each with its own samples.
    deals: bool,
    updates_in_backward: bool,
}

impl Piped {
    fn build(engine: &Engine, setup: &Setup<'_>) -> Result<Box<dyn Subject>> {
        let Engine::Pipeline { recompute, living, replicas, updates_in_backward, own_list, .. } =
            engine
        else {
            unreachable!("a pipeline")
        };
        let (schedule, devices) = engine.fitting(setup);
        let ranks = setup.world.size();
        let here = if ranks == 1 { devices * replicas } else { devices };
        let arenas: Vec<Arena> = (0..here).map(arena).collect();
        let layers = setup.model.layers();
        let deals = ranks > 1 && *replicas > 1;
        let stages = schedule.stages_per_device() * devices * if deals { 1 } else { ranks };
        let sample = Samples::new(setup.model, 1, 0, setup.kind);
        let locations = match living {
            Living::OnDevices => Offload::Device,
            Living::OnHost => Offload::Host,
            Living::Mixed => {
                let location =
                    |stage| if stage % 2 == 0 { Location::Host } else { Location::Device };
                Offload::Each((0..stages).map(location).collect())
            }
            // A plan has a schedule of its own.
            Living::Planned(_) if ranks * replicas > 1 || own_list.is_some() => Offload::Host,
            Living::Planned(_) => Offload::Auto { gpu: Some(PLANNED_BYTES), host: None },
        };
        let is_auto = matches!(locations, Offload::Auto { .. });
        let count = layers.len();
        let builder =
            Pipeline::builder(layers).devices((0..here).map(|number| device(number, &arenas)));
        let builder = match living {
            Living::Planned(Given::Nothing) if is_auto => builder,
            Living::Planned(Given::Balance) if is_auto => {
                // All layers that are left over go to the last stage.
                let mut balance = vec![1; stages];
                balance[stages - 1] += count - stages;
                builder.schedule(schedule).balance(balance)
            }
            _ => builder.schedule(schedule),
        };
        // Suggests another number of micro-batches than the one that is set.
        let samples = 3 * setup.cut.usual_count() - 1;
        let builder = builder
            .recompute(Recompute::ALL[*recompute])
            .replicas(if deals { ranks } else { *replicas })
            .micro_batches(setup.cut.size())
            .kind(setup.kind)
            .offload(locations)
            .sample((&sample.x, &sample.x), |out, _| out.sum(out.kind()), samples)
            .non_finite(setup.non_finite())
            .world(setup.world);
        let updates_in_backward = *updates_in_backward
            && *living == Living::OnHost
            && *replicas == 1
            && here * ranks == 1;
        let mut pipe = builder.update_in_backward(updates_in_backward).build()?;
        let optimizer = pipe.optimizer(setup.method())?;
        if let (Some((recompute, seed)), Cut::Count(count)) = (own_list, setup.cut) {
            let all = if deals { devices } else { devices * ranks };
            let listed = schedule.actions(all, count, Recompute::ALL[*recompute])?;
            pipe.set_actions(reordered(listed, *seed))?;
        }
        let parts = if deals { ranks } else { *replicas };
        let world = setup.world.clone();
        Ok(Box::new(Self { pipe, optimizer, arenas, parts, world, deals, updates_in_backward }))
    }

    fn own(&self, batch: &Samples) -> Pair {
        if !self.deals {
            return pair(batch);
        }
        let part = crate::script::dealt(batch.len(), self.parts)[self.world.rank()].clone();
        pair(&batch.rows(part.start, part.len()))
    }
}

impl Engine {
    /// Returns the schedule, with at most as many devices as there are layers for.
    fn fitting(&self, setup: &Setup<'_>) -> (Schedule, usize) {
        let Self::Pipeline { devices, schedule, stages_per_device, replicas, .. } = *self else {
            unreachable!("a pipeline")
        };
        let layers = setup.model.layers().len();
        let wanted = Schedule::all(stages_per_device)[schedule];
        let devices = if setup.model.is_exact() { 1 } else { devices };
        let ranks = if replicas > 1 { 1 } else { setup.world.size() };
        let workers = layers / wanted.stages_per_device() / ranks;
        match workers.min(devices) {
            0 => (Schedule::OneFOneB, 1),
            devices => (wanted, devices),
        }
    }
}

/// Reorders the actions by a seed, respecting their dependencies; 0 leaves them unchanged.
fn reordered(actions: Actions, seed: u8) -> Actions {
    if seed == 0 {
        return actions;
    }
    let parse = |text: &str| {
        let at = text.find(|c: char| c.is_ascii_alphabetic()).expect("a letter");
        let number = |text: &str| text.parse::<usize>().expect("a number");
        (number(&text[..at]), text.as_bytes()[at] as char, number(&text[at + 1..]))
    };
    let text = actions.to_string();
    let mut left: Vec<Vec<(usize, char, usize)>> =
        text.lines().map(|line| line.split(',').map(|text| parse(text.trim())).collect()).collect();
    let all: Vec<_> = left.iter().flatten().copied().collect();
    let last = all.iter().map(|(stage, ..)| *stage).max().unwrap_or(0);
    let mut done = Vec::new();
    let mut lists: Vec<Vec<String>> = vec![Vec::new(); left.len()];
    let mut random = u64::from(seed);
    while left.iter().any(|list| !list.is_empty()) {
        let has = |stage, letters: &str, i| {
            done.iter().any(|&(s, letter, m)| s == stage && m == i && letters.contains(letter))
        };
        let is_ready = |&(stage, letter, i): &(usize, char, usize)| {
            let from_next = stage == last || has(stage + 1, "BI", i);
            let computed = if all.contains(&(stage, 'R', i)) { "R" } else { "F" };
            match letter {
                'F' => stage == 0 || has(stage - 1, "F", i),
                'R' => has(stage, "F", i) && from_next,
                'W' => has(stage, "I", i),
                _ => has(stage, computed, i) && from_next,
            }
        };
        let ready: Vec<(usize, usize)> = (left.iter().enumerate())
            .flat_map(|(device, list)| (0..list.len()).map(move |at| (device, at)))
            .filter(|&(device, at)| is_ready(&left[device][at]))
            .collect();
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let (device, at) = ready[(random >> 33) as usize % ready.len()];
        let action = left[device].remove(at);
        lists[device].push(format!("{}{}{}", action.0, action.1, action.2));
        done.push(action);
    }
    let text: Vec<String> = lists.iter().map(|list| list.join(",")).collect();
    text.join("\n").parse().unwrap_or(actions)
}

impl Subject for Piped {
    fn parts(&self) -> usize {
        self.parts
    }

    fn is_seeded(&self) -> bool {
        true
    }

    fn draws_by_layer(&self) -> bool {
        true
    }

    fn arenas(&self) -> &[Arena] {
        &self.arenas
    }

    fn backward(&mut self, batch: &Samples, loss: &LossFn) -> Result<Reported> {
        let (loss, (x, y)) = (Arc::clone(loss), self.own(batch));
        let step = self.pipe.backward(&x, &y, move |out: Tensor, y: &Target| {
            let given = out.detach();
            (loss(&out, y), given)
        })?;
        Ok(Reported::of(&step, &step.outputs))
    }

    fn accumulate(&mut self, batch: &Samples, loss: &LossFn) -> Result<Tensor> {
        let (loss, (x, y)) = (Arc::clone(loss), self.own(batch));
        self.pipe.accumulate(&x, &y, move |out: Tensor, y: &Target| {
            let given = out.detach();
            (loss(&out, y), given)
        })
    }

    fn commit(&mut self) -> Result<Reported> {
        let step = self.pipe.commit()?;
        Ok(Reported::of(&step, &Tensor::zeros([0], (Kind::Double, Device::Cpu))))
    }

    fn whole(&mut self, batch: &Samples, loss: &WholeFn) -> Result<Reported> {
        let (x, _) = self.own(batch);
        let step = self.pipe.backward_whole(&x, |out| loss(out))?;
        Ok(Reported::of(&step, &step.outputs))
    }

    fn whole_in_two(&mut self, batch: &Samples, loss: &WholeFn) -> Result<Reported> {
        let (x, _) = self.own(batch);
        let before = generator_state(Device::Cpu).expect("state");
        let outputs = self.pipe.forward(&x)?;
        let (value, given) = (loss(&outputs), outputs.detach());
        value.backward();
        let step = self.pipe.backward_from(outputs).inspect_err(|_| {
            // The forward, which succeeded, has drawn the seed.
            set_generator_state(Device::Cpu, &before).expect("state");
        })?;
        Ok(Reported { loss: value.double_value(&[]), ..Reported::of(&step, &given) })
    }

    fn evaluate(&mut self, batch: &Samples, loss: &LossFn) -> Result<Reported> {
        let (loss, (x, y)) = (Arc::clone(loss), self.own(batch));
        let step = self.pipe.evaluate(&x, &y, move |out: Tensor, y: &Target| {
            let given = out.detach();
            (loss(&out, y), given)
        })?;
        Ok(Reported::of(&step, &step.outputs))
    }

    fn map(&mut self, batch: &Samples) -> Result<Tensor> {
        self.pipe.map(&self.own(batch).0, |out: Tensor| out)
    }

    fn set_size(&mut self, cut: Cut) -> Result<()> {
        self.pipe.set_micro_batches(cut.size());
        Ok(())
    }

    fn optimizer(&mut self) -> &mut Optimizer {
        &mut self.optimizer
    }

    fn zero_grad(&mut self) -> Result<()> {
        self.pipe.zero_grad()
    }

    fn set_frozen(&mut self, name: &str, frozen: bool) -> Result<()> {
        match frozen {
            true => self.pipe.freeze(|other| other == name),
            false => self.pipe.unfreeze(|other| other == name),
        }
    }

    fn variables(&self) -> Named {
        self.pipe.variables().expect("variables")
    }

    fn gradients(&self) -> Named {
        self.pipe.gradients().expect("gradients")
    }

    fn save(&self, folder: &Path) -> Result<()> {
        self.pipe.save(folder.join("model.safetensors"))?;
        self.optimizer.save(folder.join("optimizer.safetensors"))
    }

    fn load(&mut self, folder: &Path) -> Result<()> {
        self.pipe.load(folder.join("model.safetensors"))?;
        self.optimizer.load(folder.join("optimizer.safetensors"))
    }

    fn updates_in_backward(&self) -> bool {
        self.updates_in_backward
    }

    fn sums_other_leaves(&self) -> bool {
        false
    }
}
