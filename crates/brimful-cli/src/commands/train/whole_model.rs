//! Training with the whole model on one device or on each of several, in one process or over several ranks.

use std::time::Instant;

use anyhow::{Context, Result};
use brimful::memory::Memory;
use brimful::optim::{Ema, Method, Optimizer};
use brimful::{
    DeviceSpec, Layers, MicroBatcher, Replicas, StepReport, StepRng, World, retry_on_oom,
};
use brimful_report::Record;
use tch::nn::{Path, VarStore};
use tch::{Device, Kind, Tensor};

use super::TrainOptions;
use super::advice::FixedBytes;
use super::engine::{TrainingEngine, check_model, count, memory_format, names};
use super::updates::{Kept, Updates};
use crate::data::Rows;
use crate::named::{Named, put};
use crate::progress::Ticker;
use crate::setting::{LossModel, accounts, typed, within};

/// A whole model on each device.
#[derive(Debug)]
pub(super) struct WholeModel {
    runner: Runner,
    updates: Updates,
    devices: Vec<Device>,
    /// Memory of the first device, which holds the optimizer's state.
    memory: Memory,
    kind: Kind,
    /// True if micro-batches may run as CUDA graphs.
    cuda_graphs: bool,
    ranks: usize,
    method: Method,
}

/// Engine that runs the steps of this process.
#[derive(Debug)]
enum Runner {
    One { micro: Box<MicroBatcher>, model: LossModel, store: VarStore },
    Several(Box<Replicas<LossModel>>),
}

impl WholeModel {
    /// Builds `each` replicas in each rank, with the model's initial parameters.
    pub(super) fn new(
        layers: Layers,
        each: usize,
        world: &World,
        options: &TrainOptions,
    ) -> Result<Self> {
        let devices = options.devices(world, each)?;
        let accounts = match devices[..] {
            // The account of a single device has the device's own name.
            [only] => vec![within(Memory::of(only)?, options.memory_limit)?],
            _ => accounts(&devices, options.memory_limit)?,
        };
        let memory = accounts[0].clone();
        let layers = layers.kind(options.dtype().kind());
        let runner = match each {
            1 => Runner::one(&layers, devices[0], memory.clone(), world, options)?,
            _ => Runner::several(layers, accounts, world, options)?,
        };
        let _inside = memory.enter();
        let optimizer = Optimizer::new(runner.store(), options.recipe.method())?
            .cuda_graphs(!options.no_cuda_graphs);
        let averages = |decay| Ema::new(runner.store(), decay);
        let updates = Updates::new(optimizer, &options.recipe, averages)?;
        Ok(Self {
            kind: options.dtype().kind(),
            method: options.recipe.method(),
            cuda_graphs: devices[0].is_cuda() && !options.no_cuda_graphs,
            ranks: world.size(),
            runner,
            updates,
            devices,
            memory,
        })
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
        // Replicas return a panic's message as an error, and recognise an out-of-memory one.
        let build = move |root: &Path<'_>| {
            let built = LossModel::build_with_rng(&layers, root, first);
            built.unwrap_or_else(|error| panic!("{error}"))
        };
        let mut replicas =
            Replicas::new(accounts, options.size(), build).context("the model cannot be built")?;
        // The devices are alike, and a split by measured speed would make results depend on timing.
        replicas.set_speeds(&vec![1.0; each])?;
        let device = replicas.device();
        let replicas = replicas
            .cuda_graphs(device.is_cuda() && !options.no_cuda_graphs)
            .memory_format(memory_format(device))
            .reserve(options.recipe.method())
            .join(world)?;
        Ok(Self::Several(Box::new(replicas)))
    }

    fn store(&self) -> &VarStore {
        match self {
            Self::One { store, .. } => store,
            Self::Several(replicas) => replicas.store(),
        }
    }

    /// Computes the gradient of all these mini-batches together.
    fn backward(
        &mut self,
        batches: &[(Rows, Rows)],
        kind: Kind,
        ticker: Option<Ticker>,
    ) -> brimful::Result<StepReport> {
        let mean = move |model: &LossModel, (x, y): (Rows, Rows)| {
            count(ticker.as_ref(), &y);
            model.loss(&typed(&x, kind), &y, true)
        };
        match (self, batches) {
            (Self::One { micro, model, .. }, [batch]) => {
                micro.backward(batch, |part| mean(model, part))
            }
            (Self::Several(replicas), [batch]) => replicas.backward(batch, mean),
            (Self::One { micro, model, .. }, batches) => {
                for batch in batches {
                    micro.accumulate(batch, |part| mean(model, part))?;
                }
                micro.commit()
            }
            (Self::Several(replicas), batches) => {
                for batch in batches {
                    replicas.accumulate(batch, mean.clone())?;
                }
                replicas.commit()
            }
        }
    }

    fn evaluate(
        &mut self,
        batch: &(Rows, Rows),
        kind: Kind,
    ) -> brimful::Result<StepReport<Tensor>> {
        let judged =
            move |model: &LossModel, (x, y): (Rows, Rows)| model.judge(&typed(&x, kind), &y);
        match self {
            Self::One { micro, model, .. } => micro.evaluate(batch, |part| judged(model, part)),
            Self::Several(replicas) => replicas.evaluate(batch, judged),
        }
    }
}

impl TrainingEngine for WholeModel {
    fn updates(&self) -> &Updates {
        &self.updates
    }

    fn updates_mut(&mut self) -> &mut Updates {
        &mut self.updates
    }

    fn step(
        &mut self,
        batches: Vec<(Rows, Rows)>,
        ticker: Option<Ticker>,
    ) -> brimful::Result<Record> {
        let start = Instant::now();
        // A CUDA graph does not call the closure when it replays, and a captured closure must do nothing on the host.
        let ticker = ticker.filter(|_| !self.cuda_graphs);
        let step = self.runner.backward(&batches, self.kind, ticker)?;
        // Each by itself: a retry repeats its closure.
        retry_on_oom(&self.memory, || self.updates.clip())?;
        retry_on_oom(&self.memory, || self.updates.optimizer.step())?;
        retry_on_oom(&self.memory, || self.updates.average())?;
        self.updates.optimizer.zero_grad()?;
        let mut record = Record { time: start.elapsed(), ..Record::from(step) };
        if let Some(Some(first)) = record.peaks.first_mut() {
            // The optimizer's step used the same memory.
            *first = (*first).max(self.memory.usage()?.peak);
        }
        Ok(record)
    }

    fn test(&mut self, batch: (Rows, Rows)) -> brimful::Result<(f64, Tensor)> {
        retry_on_oom(&self.memory, || self.updates.swap_in())?;
        let tested = self.runner.evaluate(&batch, self.kind);
        // Swaps back even after an error: training continues with the weights themselves.
        self.updates.swap_out()?;
        tested.map(|step| (step.loss, step.outputs))
    }

    fn variables(&self) -> Result<Named> {
        Ok(self.runner.store().variables().into_iter().collect())
    }

    fn load(&mut self, model: Named, kept: &Kept) -> Result<()> {
        check_model(&self.variables()?, &model)?;
        // Loads the state into the memory account in which the first step would create it, so that the limit counts
        // it.
        retry_on_oom(&self.memory, || self.updates.load(kept))?;
        put(self.variables()?, model)
    }

    fn fixed_bytes(&self) -> Option<FixedBytes> {
        Some(FixedBytes::of(self.runner.store(), &self.method))
    }

    fn place(&self) -> String {
        let replicas = match self.devices.len() {
            1 => format!("on {}", names(&self.devices)),
            count => format!("in {count} replicas on {}", names(&self.devices)),
        };
        match self.ranks {
            1 => replicas,
            ranks => format!("{replicas} in each of {ranks} ranks"),
        }
    }

    fn devices(&self) -> Result<Vec<brimful_report::Device>> {
        let limit = self.memory.usage()?.limit;
        let device = |(number, device): (usize, &Device)| match self.devices.len() {
            1 => brimful_report::Device { name: brimful::device::name(*device), limit },
            _ => brimful_report::Device { name: format!("device {number}"), limit },
        };
        Ok(self.devices.iter().enumerate().map(device).collect())
    }
}
