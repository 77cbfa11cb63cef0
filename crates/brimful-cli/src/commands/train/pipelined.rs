//! Training of a model in stages, as a pipeline.

use std::time::Instant;

use anyhow::{Context, Result};
use brimful::memory::Memory;
use brimful::pipeline::{Builder, OffloadPlan};
use brimful::schedule::Schedule;
use brimful::{Bytes, DeviceSpec, Layers, Pipeline, StepReport, World};
use brimful_report::Record;
use tch::{Device, Kind, Tensor};

use super::TrainOptions;
use super::engine::{TrainingEngine, check_model, count, memory_format, names};
use super::offload::{self, MeasuredInputs};
use super::options::GradientDtype;
use super::updates::{Kept, Updates};
use crate::data::Rows;
use crate::named::Named;
use crate::progress::Ticker;
use crate::setting::{MeanOver, accounts, mean_loss, right};

/// A model in stages.
#[derive(Debug)]
pub(super) struct Pipelined {
    pipeline: Pipeline,
    updates: Updates,
    kind: Kind,
    over: MeanOver,
    place: StagePlaces,
    /// Memory limit of each device, if there is one.
    limit: Option<Bytes>,
}

/// Devices, ranks and replicas of the model, for its description.
#[derive(Debug)]
struct StagePlaces {
    /// Description of the offloading; empty if no stage is offloaded.
    offload_text: String,
    /// Devices of this rank.
    devices: Vec<Device>,
    ranks: usize,
    replicas: usize,
}

impl Pipelined {
    /// Builds the pipeline. Resident stages are balanced by the times of their layers for `inputs`. A fully offloaded
    /// model is cut as finely as possible, and a planned one as planned.
    pub(super) fn new(
        layers: Layers,
        world: &World,
        options: &TrainOptions,
        over: MeanOver,
        offload: OffloadPlan,
        inputs: impl FnOnce() -> Result<MeasuredInputs>,
    ) -> Result<Self> {
        let (kind, stages) = (options.dtype().kind(), &options.stages);
        let limit = options.memory_limit;
        let each = options.ranks.devices_of_pipeline(world, stages);
        let replicas = options.ranks.replicas;
        let devices = options.devices(world, options.ranks.devices(world, stages)?)?;
        let offload_text = match &offload {
            OffloadPlan::Device => String::new(),
            offload => format!(", {offload}"),
        };
        let builder = offload::builder(offload, layers, each, options, inputs)?;
        let builder = set_up(builder, world, options)?;
        let mut pipeline = builder.build().context("the pipeline cannot be built")?;
        pipeline.trace_transfers(options.is_recorded());
        let optimizer = pipeline.optimizer(options.recipe.method())?;
        let updates = Updates::new(optimizer, &options.recipe, |decay| pipeline.ema(decay))?;
        let limit = match devices[0] {
            Device::Cpu => limit,
            accelerator => Memory::of(accelerator)?.usage()?.limit,
        };
        let place = StagePlaces { offload_text, devices, ranks: world.size(), replicas };
        Ok(Self { pipeline, updates, kind, over, place, limit })
    }

    /// Computes the gradient of all these mini-batches together.
    fn gradient(
        &mut self,
        batches: Vec<(Rows, Rows)>,
        ticker: Option<Ticker>,
    ) -> brimful::Result<StepReport> {
        let over = self.over;
        let mean = move |out: Tensor, y: &Rows| {
            count(ticker.as_ref(), y);
            mean_loss(&out, y, over)
        };
        let typed = batches.into_iter().map(|(x, y)| (x.typed(self.kind), y));
        let batches: Vec<_> = typed.collect();
        if let [(x, y)] = &batches[..] {
            return self.pipeline.backward(x, y, mean);
        }
        for (x, y) in &batches {
            self.pipeline.accumulate(x, y, mean.clone())?;
        }
        self.pipeline.commit()
    }

    fn judge(&mut self, (x, y): (Rows, Rows)) -> brimful::Result<(f64, Tensor)> {
        let x = x.typed(self.kind);
        let over = self.over;
        let step = self.pipeline.evaluate(&x, &y, move |out: Tensor, y: &Rows| {
            (mean_loss(&out, y, over), right(&out, y))
        })?;
        Ok((step.loss, step.outputs))
    }
}

/// Sets devices, dtype, micro-batches and the like as the options say.
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

impl TrainingEngine for Pipelined {
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
        let step = self.gradient(batches, ticker)?;
        self.updates.clip()?;
        self.updates.optimizer.step()?;
        self.updates.average()?;
        self.updates.optimizer.zero_grad()?;
        Ok(Record { time: start.elapsed(), ..Record::from(step) })
    }

    fn test(&mut self, batch: (Rows, Rows)) -> brimful::Result<(f64, Tensor)> {
        self.updates.swap_in()?;
        let tested = self.judge(batch);
        // Swaps back even after an error: training continues with the weights themselves.
        self.updates.swap_out()?;
        tested
    }

    fn variables(&self) -> Result<Named> {
        Ok(self.pipeline.variables()?)
    }

    fn load(&mut self, model: Named, kept: &Kept) -> Result<()> {
        let here = self.variables()?;
        // Over several ranks, the pipeline checks: it knows the other ranks' variables.
        if self.place.ranks == 1 {
            check_model(&here, &model)?;
        }
        self.updates.load(kept)?;
        Ok(self.pipeline.set_variables(model)?)
    }

    fn schedule(&self) -> Option<Schedule> {
        Some(self.pipeline.schedule())
    }

    fn uses_host(&self) -> bool {
        !self.place.offload_text.is_empty()
    }

    fn place(&self) -> String {
        let StagePlaces { offload_text, devices, ranks, replicas } = &self.place;
        let (schedule, names) = (self.pipeline.schedule(), names(devices));
        let sizes = self.pipeline.balance().sizes();
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

    fn devices(&self) -> Result<Vec<brimful_report::Device>> {
        let device =
            |number| brimful_report::Device { name: format!("device {number}"), limit: self.limit };
        let devices = self.pipeline.devices().len() * self.place.ranks;
        Ok((0..devices).map(device).collect())
    }
}
