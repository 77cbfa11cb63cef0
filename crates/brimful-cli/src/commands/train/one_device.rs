//! Training on one device, in micro-batches.

use std::time::Instant;

use anyhow::{Context, Result};
use brimful::layers::Model;
use brimful::memory::Memory;
use brimful::micro::Layout;
use brimful::optim::Optimizer;
use brimful::report::{self, Record};
use brimful::save::Metadata;
use brimful::{Layers, Loss, MicroBatcher, device};
use tch::nn::{ModuleT, VarStore};
use tch::{Kind, Tensor};

use super::TrainOptions;
use super::engine::{Engine, Named, check_model, named, put};
use crate::setting::{loss, mean, right, typed, within};

/// A model on one device.
#[derive(Debug)]
pub(super) struct OneDevice {
    store: VarStore,
    optimizer: Optimizer,
    model: Model,
    micro: MicroBatcher,
    memory: Memory,
    kind: Kind,
}

impl OneDevice {
    /// The model with its first parameters, inside its memory.
    pub(super) fn new(layers: &Layers, options: &TrainOptions) -> Result<Self> {
        let device = options.device()?;
        options.dtype.prepare(device)?;
        let memory = within(Memory::of(device)?, options.memory_limit)?;
        let _inside = memory.enter();
        let mut store = VarStore::new(device);
        let model = layers.build(&store.root()).context("the model was not built")?;
        let kind = options.dtype.kind();
        store.set_kind(kind);
        let optimizer = Optimizer::new(&store, options.method())?.replay(!options.no_replay);
        let micro = MicroBatcher::new(&store, options.size())
            .memory(memory.clone())
            .reserve(options.method())
            .replay(device.is_cuda() && !options.no_replay)
            .layout(if device.is_cuda() { Layout::Measured } else { Layout::AsIs });
        Ok(Self { micro, store, optimizer, model, memory, kind })
    }
}

impl Engine for OneDevice {
    fn set_learning_rate(&mut self, rate: f64) -> brimful::Result<()> {
        self.optimizer.set_learning_rate(rate)
    }

    fn step(&mut self, batch: (Tensor, Tensor)) -> brimful::Result<Record> {
        let start = Instant::now();
        let (model, kind) = (&self.model, self.kind);
        let step = self.micro.backward(&batch, |(x, y)| {
            Loss::mean(loss(&model.forward_t(&typed(&x, kind), true), &y))
        })?;
        self.micro.guard(|| self.optimizer.step())?;
        self.optimizer.zero_grad()?;
        let peak = step.peak.unwrap_or_default().max(self.memory.usage()?.peak);
        Ok(Record { peaks: vec![Some(peak)], time: start.elapsed(), ..Record::from(step) })
    }

    fn test(&mut self, batch: (Tensor, Tensor)) -> brimful::Result<(f64, f64)> {
        let (model, kind) = (&self.model, self.kind);
        let step = self.micro.evaluate(&batch, |(x, y)| {
            let logits = model.forward_t(&typed(&x, kind), false);
            (Loss::mean(loss(&logits, &y)), right(&logits, &y))
        })?;
        Ok((step.loss, mean(&step.outputs)))
    }

    fn variables(&self) -> Result<Named> {
        Ok(named(&self.store))
    }

    fn optimizer_state(&self) -> Result<(Named, Metadata)> {
        Ok(self.optimizer.state())
    }

    fn load(&mut self, model: Named, state: &Named, texts: &Metadata) -> Result<()> {
        check_model(&self.variables()?, &model)?;
        self.optimizer.load_state(state, texts)?;
        put(&self.store, model)
    }

    fn place(&self) -> String {
        format!("on {}", device::name(self.store.device()))
    }

    fn devices(&self) -> Result<Vec<report::Device>> {
        let name = device::name(self.store.device());
        Ok(vec![report::Device { name, limit: self.memory.usage()?.limit }])
    }
}
