//! Training with a whole model on each of several devices, of one process or of several ranks.

use std::time::Instant;

use anyhow::{Context, Result};
use brimful::layers::Model;
use brimful::memory::Memory;
use brimful::micro::Layout;
use brimful::optim::Optimizer;
use brimful::pipeline::StageDevice;
use brimful::report::{self, Record};
use brimful::save::Metadata;
use brimful::{Layers, Loss, Replicas, World, batch, guard, split};
use tch::nn::{ModuleT, Path};
use tch::{Device, Kind, Tensor};

use super::TrainOptions;
use super::engine::{Engine, Named, check_model, named, names, put};
use crate::setting::{accounts, loss, right, typed};

/// A model on several devices.
#[derive(Debug)]
pub(super) struct Replicated {
    replicas: Replicas<Model>,
    optimizer: Optimizer,
    world: World,
    devices: Vec<Device>,
    /// The first device's, where the optimizer's state is.
    memory: Memory,
    kind: Kind,
}

impl Replicated {
    /// So many replicas in each rank, with the model's first parameters.
    pub(super) fn new(
        layers: Layers,
        each: usize,
        world: &World,
        options: &TrainOptions,
    ) -> Result<Self> {
        let devices = options.devices(world, each)?;
        let accounts = accounts(&devices, options.memory_limit)?;
        let memory = accounts[0].clone();
        let accounts = accounts.into_iter().map(StageDevice::from);
        // Replicas tell a panic's words, and know one that is about memory.
        let build =
            move |root: &Path<'_>| layers.build(root).unwrap_or_else(|error| panic!("{error}"));
        let mut replicas =
            Replicas::new(accounts, options.size(), build).context("the model was not built")?;
        let kind = options.dtype.kind();
        replicas.store_mut().set_kind(kind);
        let is_cuda = devices[0].is_cuda();
        let replicas = replicas
            // Of one kind; and what they have is not to depend on the clock.
            .speeds(&vec![1.0; each])?
            .replay(is_cuda && !options.no_replay)?
            .layout(if is_cuda { Layout::Measured } else { Layout::AsIs })?
            .reserve(options.method())
            .world(world)?;
        let optimizer =
            Optimizer::new(replicas.store(), options.method())?.replay(!options.no_replay);
        Ok(Self { replicas, optimizer, world: world.clone(), devices, memory, kind })
    }

    /// This rank's part of a mini-batch, which all ranks have.
    fn part(&self, (x, y): &(Tensor, Tensor)) -> brimful::Result<(Tensor, Tensor)> {
        let samples = batch::len(x)?;
        let parts = split::by_count(samples, self.world.size())?;
        let part = parts.get(self.world.rank()).cloned().unwrap_or(samples..samples);
        let (start, length) = (part.start as i64, part.len() as i64);
        Ok((x.f_narrow(0, start, length)?, y.f_narrow(0, start, length)?))
    }
}

impl Engine for Replicated {
    fn set_learning_rate(&mut self, rate: f64) -> brimful::Result<()> {
        self.optimizer.set_learning_rate(rate)
    }

    fn step(&mut self, batch: (Tensor, Tensor)) -> brimful::Result<Record> {
        let (start, kind) = (Instant::now(), self.kind);
        let step = self.replicas.backward(&self.part(&batch)?, move |model, (x, y)| {
            Loss::mean(loss(&model.forward_t(&typed(&x, kind), true), &y))
        })?;
        guard(&self.memory, || self.optimizer.step())?;
        self.optimizer.zero_grad()?;
        Ok(Record { time: start.elapsed(), ..Record::from(step) })
    }

    fn test(&mut self, batch: (Tensor, Tensor)) -> brimful::Result<(f64, f64)> {
        let kind = self.kind;
        let step = self.replicas.evaluate(&self.part(&batch)?, move |model, (x, y)| {
            let logits = model.forward_t(&typed(&x, kind), false);
            (Loss::mean(loss(&logits, &y)), right(&logits, &y))
        })?;
        let answers = step.outputs.numel() as f64;
        let right = step.outputs.to_kind(Kind::Double).sum(Kind::Double).double_value(&[]);
        let all = Tensor::from_slice(&[right, answers]);
        self.world.sum(&[all.shallow_clone()])?;
        Ok((step.loss, all.double_value(&[0]) / all.double_value(&[1])))
    }

    fn variables(&self) -> Result<Named> {
        Ok(named(self.replicas.store()))
    }

    fn optimizer_state(&self) -> Result<(Named, Metadata)> {
        Ok(self.optimizer.state())
    }

    fn load(&mut self, model: Named, state: &Named, texts: &Metadata) -> Result<()> {
        check_model(&self.variables()?, &model)?;
        self.optimizer.load_state(state, texts)?;
        put(self.replicas.store(), model)
    }

    fn place(&self) -> String {
        let replicas = match self.devices.len() {
            1 => format!("on {}", names(&self.devices)),
            count => format!("in {count} replicas on {}", names(&self.devices)),
        };
        match self.world.size() {
            1 => replicas,
            ranks => format!("{replicas} in each of {ranks} ranks"),
        }
    }

    fn devices(&self) -> Result<Vec<report::Device>> {
        let limit = self.memory.usage()?.limit;
        let device = |number| report::Device { name: format!("device {number}"), limit };
        Ok((0..self.devices.len()).map(device).collect())
    }
}
