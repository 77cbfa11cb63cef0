//! A model on its devices, with its optimizer. Each device has the whole model, or a pipeline has the model in
//! stages.

use std::time::Instant;

use anyhow::{Context, Result, bail};
use brimful::internal::OffloadPlan;
use brimful::memory::Memory;
use brimful::micro::MemoryFormat;
use brimful::optim::{Ema, Optimizer};
use brimful::pipeline::Builder;
use brimful::save::Metadata;
use brimful::schedule::Schedule;
use brimful::{
    Bytes, DeviceSpec, Layers, MicroBatcher, Pipeline, Replicas, StepReport, StepRng, World,
    device, retry_on_oom,
};
use brimful_report::Record;
use tch::nn::{Path, VarStore};
use tch::{Device, Kind, Tensor};

use super::offload::{self, MeasuredInputs};
use super::options::{GradientDtype, TrainOptions};
use crate::data::Rows;
use crate::exit::ensure_use;
use crate::named::{Comparison, Named, put};
use crate::progress::Ticker;
use crate::setting::{
    LossModel, MeanOver, NormStatistics, accounts, mean_loss, right, typed, within,
};

/// A model on its devices, with its optimizer.
#[derive(Debug)]
pub(super) struct Engine {
    runner: Runner,
    optimizer: Optimizer,
    /// Averages of the weights, if `--ema` is given.
    averages: Option<Ema>,
    clip_norm: Option<f64>,
    /// Dtype of parameters and activations.
    kind: Kind,
    over: MeanOver,
    /// Memory of the first device, which holds the optimizer's state; none for a pipeline.
    memory: Option<Memory>,
    /// Memory limit of each device, if there is one.
    limit: Option<Bytes>,
    /// Devices of this rank.
    devices: Vec<Device>,
    ranks: usize,
    replicas: usize,
    /// Description of the offloading; empty if no stage is offloaded.
    offload_text: String,
    /// True if micro-batches may run as CUDA graphs.
    cuda_graphs: bool,
}

/// Part of the library that runs the steps.
#[derive(Debug)]
enum Runner {
    /// The whole model on one device.
    One { micro: Box<MicroBatcher>, model: LossModel, store: VarStore },
    /// The whole model on each of several devices.
    Several(Box<Replicas<LossModel>>),
    /// The model in stages.
    Staged(Box<Pipeline>),
}

/// State that is saved beside a model: the optimizer's state, and the state of the weight averages if there are
/// averages.
#[derive(Debug)]
pub(super) struct Kept {
    pub(super) optimizer: (Named, Metadata),
    pub(super) averages: Option<(Named, Metadata)>,
}

impl Engine {
    /// Builds the engine that the options ask for, with the model's initial parameters. `inputs` returns a
    /// micro-batch to measure layers with.
    pub(super) fn new(
        layers: Layers,
        world: &World,
        options: &TrainOptions,
        over: MeanOver,
        mut inputs: impl FnMut() -> Result<MeasuredInputs>,
    ) -> Result<Self> {
        let stages = &options.stages;
        ensure_use!(
            over == MeanOver::Samples || !stages.update_in_backward,
            "--update-in-backward needs a loss over all tokens; with conversations only the answers count: remove the flag"
        );
        let whole = options.ranks.whole_models(world);
        let each = options.ranks.devices_of_pipeline(world, stages);
        let offload = offload::settle(&layers, each, world, options, &mut inputs)?;
        let is_exact = options.batch_norm == Some(NormStatistics::Exact);
        // Exact BatchNorms have a barrier across micro-batches, which needs a pipeline, even on one device.
        let is_cut = is_exact || stages.stages.is_some() || !matches!(offload, OffloadPlan::Device);
        match whole.filter(|_| !is_cut) {
            Some(each) => Self::whole(layers, each, world, options, over),
            None => Self::staged(layers, world, options, over, offload, inputs),
        }
    }

    /// Builds an engine in which each device has the whole model, with `each` replicas in this rank.
    fn whole(
        layers: Layers,
        each: usize,
        world: &World,
        options: &TrainOptions,
        over: MeanOver,
    ) -> Result<Self> {
        let devices = options.devices(world, each)?;
        let accounts = match devices[..] {
            // The memory of a single device gets the device's own name.
            [only] => vec![within(Memory::of(only)?, options.memory_limit)?],
            _ => accounts(&devices, options.memory_limit)?,
        };
        let memory = accounts[0].clone();
        let limit = memory.usage()?.limit;
        let layers = layers.kind(options.dtype().kind());
        let runner = match each {
            1 => Runner::one(&layers, devices[0], memory.clone(), world, options)?,
            _ => Runner::several(layers, accounts, world, options)?,
        };
        let cuda_graphs = devices[0].is_cuda() && !options.no_cuda_graphs;
        let _inside = memory.enter();
        let engine = Self::with_optimizer(runner, devices, limit, world, options, over)?;
        Ok(Self { memory: Some(memory.clone()), cuda_graphs, ..engine })
    }

    /// Builds a pipeline. If nothing is offloaded, stages are balanced by the times of their layers for `inputs`.
    /// A fully offloaded model is cut as finely as possible. If only some stages are offloaded, the offload plan
    /// contains the cut.
    fn staged(
        layers: Layers,
        world: &World,
        options: &TrainOptions,
        over: MeanOver,
        offload: OffloadPlan,
        inputs: impl FnOnce() -> Result<MeasuredInputs>,
    ) -> Result<Self> {
        let each = options.ranks.devices_of_pipeline(world, &options.stages);
        let devices = options.devices(world, options.ranks.devices(world, &options.stages)?)?;
        let offload_text = match &offload {
            OffloadPlan::Device => String::new(),
            offload => format!(", {offload}"),
        };
        let builder = offload::builder(offload, layers, each, options, inputs)?;
        let builder = set_up(builder, world, options)?;
        let mut pipeline = builder.build().context("the pipeline cannot be built")?;
        pipeline.trace_transfers(options.is_recorded());
        let limit = match devices[0] {
            Device::Cpu => options.memory_limit,
            accelerator => Memory::of(accelerator)?.usage()?.limit,
        };
        let runner = Runner::Staged(Box::new(pipeline));
        let engine = Self::with_optimizer(runner, devices, limit, world, options, over)?;
        Ok(Self { offload_text, ..engine })
    }

    /// Makes an engine of a runner: adds the optimizer, and averages of the weights if `--ema` is given.
    fn with_optimizer(
        mut runner: Runner,
        devices: Vec<Device>,
        limit: Option<Bytes>,
        world: &World,
        options: &TrainOptions,
        over: MeanOver,
    ) -> Result<Self> {
        let recipe = &options.recipe;
        let (mut optimizer, averages) = match (&mut runner, recipe.ema) {
            (Runner::Staged(pipeline), ema) => {
                let optimizer = pipeline.optimizer(recipe.method())?;
                (optimizer, ema.map(|decay| pipeline.ema(decay)).transpose()?)
            }
            (Runner::One { store, .. }, ema) => optimizer_of(store, ema, options)?,
            (Runner::Several(replicas), ema) => optimizer_of(replicas.store(), ema, options)?,
        };
        optimizer.decay_only_matrices()?;
        Ok(Self {
            runner,
            optimizer,
            averages: averages.map(|averages| averages.warmup(true)),
            clip_norm: recipe.clip_norm,
            kind: options.dtype().kind(),
            over,
            memory: None,
            limit,
            devices,
            ranks: world.size(),
            replicas: options.ranks.replicas,
            offload_text: String::new(),
            cuda_graphs: false,
        })
    }

    pub(super) fn set_learning_rate(&mut self, rate: f64) -> brimful::Result<()> {
        self.optimizer.set_learning_rate(rate)
    }

    /// Takes one step on all of these mini-batches of inputs and targets. `ticker` counts samples as their losses
    /// are computed.
    pub(super) fn step(
        &mut self,
        batches: Vec<(Rows, Rows)>,
        ticker: Option<Ticker>,
    ) -> brimful::Result<Record> {
        let start = Instant::now();
        // The closure of the loss cannot count samples for CUDA graphs: a replay does not call the closure, and a
        // captured closure must do nothing on the host.
        let ticker = ticker.filter(|_| !self.cuda_graphs);
        let step = self.backward(batches, ticker)?;
        let Self { optimizer, averages, memory, .. } = self;
        // Each call has its own retry, because a retry repeats the whole closure.
        if let Some(length) = self.clip_norm {
            retry_in(memory.as_ref(), || optimizer.clip_gradient_norm(length))?;
        }
        retry_in(memory.as_ref(), || optimizer.step())?;
        if let Some(averages) = averages {
            retry_in(memory.as_ref(), || averages.update())?;
        }
        optimizer.zero_grad()?;
        let mut record = Record { time: start.elapsed(), ..Record::from(step) };
        if let (Some(memory), Some(Some(first))) = (memory, record.peaks.first_mut()) {
            // The optimizer's step uses the same memory, and can raise its peak.
            *first = (*first).max(memory.usage()?.peak);
        }
        Ok(record)
    }

    /// Computes the gradient of all these mini-batches together.
    fn backward(
        &mut self,
        batches: Vec<(Rows, Rows)>,
        ticker: Option<Ticker>,
    ) -> brimful::Result<StepReport> {
        let (kind, over) = (self.kind, self.over);
        let own = ticker.clone();
        let of_model = move |model: &LossModel, (x, y): (Rows, Rows)| {
            count(own.as_ref(), &y);
            model.loss(&typed(&x, kind), &y, true)
        };
        let of_outputs = move |out: Tensor, y: &Rows| {
            count(ticker.as_ref(), y);
            mean_loss(&out, y, over)
        };
        let batches = match &self.runner {
            // A pipeline takes inputs in the model's dtype. The other runners convert each micro-batch on its
            // device.
            Runner::Staged(_) => batches.into_iter().map(|(x, y)| (x.typed(kind), y)).collect(),
            _ => batches,
        };
        match (&mut self.runner, &batches[..]) {
            (Runner::One { micro, model, .. }, [batch]) => {
                micro.backward(batch, |part| of_model(model, part))
            }
            (Runner::One { micro, model, .. }, batches) => {
                for batch in batches {
                    micro.accumulate(batch, |part| of_model(model, part))?;
                }
                micro.commit()
            }
            (Runner::Several(replicas), [batch]) => replicas.backward(batch, of_model),
            (Runner::Several(replicas), batches) => {
                for batch in batches {
                    replicas.accumulate(batch, of_model.clone())?;
                }
                replicas.commit()
            }
            (Runner::Staged(pipeline), [(x, y)]) => pipeline.backward(x, y, of_outputs),
            (Runner::Staged(pipeline), batches) => {
                for (x, y) in batches {
                    pipeline.accumulate(x, y, of_outputs.clone())?;
                }
                pipeline.commit()
            }
        }
    }

    /// Returns the loss over the samples of all ranks, and for each of this rank's predictions whether it is
    /// right. Tests the averaged weights, if there are averages.
    pub(super) fn test(&mut self, batch: (Rows, Rows)) -> brimful::Result<(f64, Tensor)> {
        if let Some(averages) = &mut self.averages {
            retry_in(self.memory.as_ref(), || averages.swap_in())?;
        }
        let tested = self.evaluate(batch);
        // Swaps back even after an error, because training continues with the weights themselves.
        self.averages.as_mut().map_or(Ok(()), Ema::swap_out)?;
        tested.map(|step| (step.loss, step.outputs))
    }

    fn evaluate(&mut self, batch: (Rows, Rows)) -> brimful::Result<StepReport<Tensor>> {
        let (kind, over) = (self.kind, self.over);
        let judged =
            move |model: &LossModel, (x, y): (Rows, Rows)| model.judge(&typed(&x, kind), &y);
        match &mut self.runner {
            Runner::One { micro, model, .. } => micro.evaluate(&batch, |part| judged(model, part)),
            Runner::Several(replicas) => replicas.evaluate(&batch, judged),
            Runner::Staged(pipeline) => {
                let (x, y) = batch;
                pipeline.evaluate(&x.typed(kind), &y, move |out: Tensor, y: &Rows| {
                    (mean_loss(&out, y, over), right(&out, y))
                })
            }
        }
    }

    /// Returns the parameters and running statistics, by name. A change to a returned tensor changes the model. In
    /// a pipeline over ranks, the first rank also gets copies of the other ranks' variables.
    pub(super) fn variables(&self) -> Result<Named> {
        Ok(match (&self.runner, self.store()) {
            (Runner::Staged(pipeline), _) => pipeline.variables()?,
            (_, store) => store.into_iter().flat_map(VarStore::variables).collect(),
        })
    }

    /// Returns the state to save beside the variables. All ranks take part.
    pub(super) fn kept(&self) -> Result<Kept> {
        let averages = self.averages.as_ref().map(Ema::state).transpose()?;
        Ok(Kept { optimizer: self.optimizer.state()?, averages })
    }

    /// Loads the model and the state that a run has saved. Loads averages only if both this run and the saved run
    /// have averages. Fails if the saved model is not this model.
    pub(super) fn load(&mut self, model: Named, kept: &Kept) -> Result<()> {
        let here = self.variables()?;
        // A pipeline over several ranks checks the model itself, because only the pipeline knows the other ranks'
        // variables.
        if self.ranks == 1 || self.store().is_some() {
            check_model(&here, &model)?;
        }
        let Self { optimizer, averages, memory, .. } = self;
        // Loads the state into the memory in which the first step would create it, so that the state counts
        // against the limit.
        let (state, texts) = &kept.optimizer;
        retry_in(memory.as_ref(), || optimizer.load_state(state, texts))?;
        if let (Some(averages), Some((state, texts))) = (averages, &kept.averages) {
            retry_in(memory.as_ref(), || averages.load_state(state, texts))?;
        }
        match &mut self.runner {
            Runner::Staged(pipeline) => Ok(pipeline.set_variables(model)?),
            _ => put(here, model),
        }
    }

    /// Returns the variables of a whole model, or none for a pipeline.
    pub(super) fn store(&self) -> Option<&VarStore> {
        match &self.runner {
            Runner::One { store, .. } => Some(store),
            Runner::Several(replicas) => Some(replicas.store()),
            Runner::Staged(_) => None,
        }
    }

    /// Returns the schedule of a pipeline, or none for a whole model.
    pub(super) fn schedule(&self) -> Option<Schedule> {
        match &self.runner {
            Runner::Staged(pipeline) => Some(pipeline.schedule()),
            _ => None,
        }
    }

    /// Returns whether any stage is offloaded.
    pub(super) fn uses_host(&self) -> bool {
        !self.offload_text.is_empty()
    }

    /// Describes the devices that the model trains on.
    pub(super) fn place(&self) -> String {
        let Self { ranks, replicas, offload_text, .. } = self;
        let names = names(&self.devices);
        let Runner::Staged(pipeline) = &self.runner else {
            let replicas = match self.devices.len() {
                1 => format!("on {names}"),
                count => format!("in {count} replicas on {names}"),
            };
            return match ranks {
                1 => replicas,
                ranks => format!("{replicas} in each of {ranks} ranks"),
            };
        };
        let (schedule, sizes) = (pipeline.schedule(), pipeline.balance().sizes());
        let stages = format!(
            "in {} stages of {sizes:?} layers on {names}, {schedule}{offload_text}",
            sizes.len()
        );
        match ranks {
            1 if *replicas == 1 => stages,
            1 => format!("{stages}; {replicas} replicas"),
            _ => format!("{stages}; {ranks} ranks, {replicas} replicas"),
        }
    }

    /// Lists the devices whose peaks the steps report, with their memory limits.
    pub(super) fn devices(&self) -> Vec<brimful_report::Device> {
        let names = match (&self.runner, &self.devices[..]) {
            (Runner::Staged(pipeline), _) => numbered(pipeline.devices().len() * self.ranks),
            (_, [only]) => vec![device::name(*only)],
            (_, several) => numbered(several.len()),
        };
        let device = |name| brimful_report::Device { name, limit: self.limit };
        names.into_iter().map(device).collect()
    }
}

impl Runner {
    fn one(
        layers: &Layers,
        device: Device,
        memory: Memory,
        world: &World,
        options: &TrainOptions,
    ) -> Result<Self> {
        let _inside = memory.enter();
        let store = VarStore::new(device);
        let built = LossModel::build_with_rng(layers, &store.root(), StepRng::of_first_values()?);
        let model = built.context("the model cannot be built")?;
        let micro = MicroBatcher::new(&store, options.size())
            .memory(memory.clone())
            .reserve(options.recipe.method())
            .cuda_graphs(device.is_cuda() && !options.no_cuda_graphs)
            .memory_format(memory_format(device))
            .join(world)?;
        Ok(Self::One { micro: Box::new(micro), model, store })
    }

    fn several(
        layers: Layers,
        accounts: Vec<Memory>,
        world: &World,
        options: &TrainOptions,
    ) -> Result<Self> {
        let each = accounts.len();
        let accounts = accounts.into_iter().map(DeviceSpec::from);
        let first = StepRng::of_first_values()?;
        // `Replicas` turns a panic of this closure into an error with the panic's message, and recognises
        // out-of-memory messages.
        let build = move |root: &Path<'_>| {
            let built = LossModel::build_with_rng(&layers, root, first);
            built.unwrap_or_else(|error| panic!("{error}"))
        };
        let mut replicas =
            Replicas::new(accounts, options.size(), build).context("the model cannot be built")?;
        // Gives all devices equal shares. The devices are alike, and shares by measured speed would make results
        // depend on timing.
        replicas.set_speeds(&vec![1.0; each])?;
        let device = replicas.device();
        let replicas = replicas
            .cuda_graphs(device.is_cuda() && !options.no_cuda_graphs)
            .memory_format(memory_format(device))
            .reserve(options.recipe.method())
            .join(world)?;
        Ok(Self::Several(Box::new(replicas)))
    }
}

/// Sets devices, dtype, micro-batches and other settings of a pipeline from the options.
pub(super) fn set_up(builder: Builder, world: &World, options: &TrainOptions) -> Result<Builder> {
    let stages = &options.stages;
    let devices = options.devices(world, options.ranks.devices(world, stages)?)?;
    let builder = builder
        .devices(accounts(&devices, options.memory_limit)?.into_iter().map(DeviceSpec::from))
        .world(world)
        .replicas(options.ranks.replicas)
        .kind(options.dtype().kind())
        .memory_format(memory_format(devices[0]))
        .reserve(options.recipe.method())
        .micro_batches(options.size())
        .update_in_backward(stages.update_in_backward);
    let builder = stages.recompute.into_iter().fold(builder, Builder::recompute);
    Ok(match stages.offload_gradients {
        GradientDtype::F32 => builder,
        GradientDtype::Bf16 => builder.offload_gradients(Kind::BFloat16),
    })
}

/// Makes the optimizer for a whole model's variables, and their averages if a decay `ema` is given.
fn optimizer_of(
    store: &VarStore,
    ema: Option<f64>,
    options: &TrainOptions,
) -> Result<(Optimizer, Option<Ema>)> {
    let optimizer = Optimizer::new(store, options.recipe.method())?;
    let averages = ema.map(|decay| Ema::new(store, decay)).transpose()?;
    Ok((optimizer.cuda_graphs(!options.no_cuda_graphs), averages))
}

/// Runs work of the optimizer in this memory. If memory runs out, runs the work once more. A pipeline gives no
/// memory, because its workers run the work in the memories of their stages.
fn retry_in<T>(
    memory: Option<&Memory>,
    mut work: impl FnMut() -> brimful::Result<T>,
) -> brimful::Result<T> {
    match memory {
        Some(memory) => retry_on_oom(memory, work),
        None => work(),
    }
}

/// Checks that the saved tensors are exactly the model's.
fn check_model(here: &Named, saved: &Named) -> Result<()> {
    let saved = saved.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone()));
    match Comparison::new(here, saved.collect()).differences() {
        Some(differences) => bail!("it is of another model: {differences}"),
        None => Ok(()),
    }
}

/// Returns the memory format of images and convolutions on a device.
fn memory_format(device: Device) -> MemoryFormat {
    if device.is_cuda() { MemoryFormat::Measured } else { MemoryFormat::AsIs }
}

/// Counts the samples of a micro-batch with these targets.
fn count(ticker: Option<&Ticker>, targets: &Tensor) {
    if let Some(ticker) = ticker {
        ticker.advance(targets.size().first().map_or(1, |samples| *samples as usize));
    }
}

/// Joins the devices' names, without repeats.
fn names(devices: &[Device]) -> String {
    let mut names: Vec<String> = devices.iter().map(|place| device::name(*place)).collect();
    names.dedup();
    names.join(", ")
}

/// Returns names for reports: of the devices of a pipeline, or of several replicas.
fn numbered(devices: usize) -> Vec<String> {
    (0..devices).map(|number| format!("device {number}")).collect()
}
