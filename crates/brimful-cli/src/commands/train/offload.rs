//! Offloading of some or all of a model to the host: the flag, and the decision for a model and the memory at hand.

use anyhow::Result;
use brimful::balance;
use brimful::nn::Lora;
use brimful::pipeline::{BalanceBy, Builder, Offload};
use brimful::schedule::{Recompute, Schedule};
use brimful::{Bytes, Layers, Pipeline, Size, World, gradient_factor};
use clap::ValueEnum;
use tch::{Device, Kind, Tensor};

use super::TrainOptions;
use crate::exit::{ensure_use, ran_out};
use crate::offload_plan::{OffloadPlan, OffloadQuestion};
use crate::setting::{
    MeanOver, NormStatistics, capacity, loss, parameters_used, shown_as_given, typed,
};

/// Where weights, gradients and the optimizer's state live.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OffloadArgument {
    /// On the device as far as they fit there, else on the host; layers are measured for it
    Auto,
    /// On the device
    None,
    /// On the host; a stage's weights come to the device when it is their turn
    All,
}

shown_as_given!(OffloadArgument);

/// Inputs to measure layers with.
#[derive(Debug)]
pub(super) struct MeasuredInputs {
    /// Inputs of one micro-batch; its size is a guess if it is automatic.
    pub(super) micro_batch: Tensor,
    /// Targets of these inputs.
    pub(super) targets: Tensor,
    /// Samples in a mini-batch.
    pub(super) batch_size: usize,
}

impl TrainOptions {
    /// Returns the place of the model's weights, and whether the options name it. Naming stages or a memory limit
    /// suggests that the model may not fit: offloading is then planned stage by stage, if it can be.
    pub(super) fn offload(&self, world: &World) -> (OffloadArgument, bool) {
        let may_not_fit = self.stages.stages.is_some() || self.memory_limit.is_some();
        match self.stages.offload {
            Some(said) => (said, true),
            None if may_not_fit && !is_all_or_nothing(world, self) => {
                (OffloadArgument::Auto, false)
            }
            None => (OffloadArgument::None, false),
        }
    }
}

impl OffloadPlan {
    /// Resolves the options for a model on `devices` devices of each rank.
    pub(super) fn settle(
        layers: &Layers,
        devices: usize,
        world: &World,
        options: &TrainOptions,
        over: MeanOver,
        inputs: impl FnOnce() -> Result<MeasuredInputs>,
    ) -> Result<Self> {
        let is_said = match options.offload(world) {
            (OffloadArgument::None, _) => return Ok(Self::Device),
            (OffloadArgument::All, _) => return Ok(Self::Host),
            (OffloadArgument::Auto, is_said) => is_said,
        };
        let device = options.devices(world, 1)?[0];
        let Some(capacity) = capacity(device, options.memory_limit)? else {
            return Ok(Self::Device);
        };
        let kind = options.dtype().kind();
        let (needed, capacity_of_all) =
            (resident_bytes(layers, options, kind)?, capacity.0 * devices as u64);
        if is_all_or_nothing(world, options) {
            return Ok(if needed <= capacity_of_all { Self::Device } else { Self::Host });
        }
        // Does not measure layers without being asked to, if there is plenty of free memory.
        if !is_said && needed <= capacity_of_all / 2 {
            return Ok(Self::Device);
        }
        let inputs = inputs()?;
        let question = question(device, vec![capacity; devices], options, over, &inputs, layers)?;
        let planned = OffloadPlan::plan(layers, (&inputs.micro_batch, &inputs.targets), question);
        match planned {
            // The plan is optional here: if none fits, the run stays on the device and fails with the device's error.
            Ok(Self::Host) if !is_said => Ok(Self::Device),
            Err(error) if !is_said && ran_out(&error) => Ok(Self::Device),
            planned => planned,
        }
    }

    /// Makes a builder of a pipeline over `devices` devices, cut and offloaded as decided.
    pub(super) fn builder(
        self,
        layers: Layers,
        devices: usize,
        options: &TrainOptions,
        inputs: impl FnOnce() -> Result<MeasuredInputs>,
    ) -> Result<Builder> {
        let ((balance, schedule), offload) = match self {
            Self::Device => (resident(&layers, devices, options, &inputs()?)?, Offload::Device),
            Self::Host => (on_host(&layers, devices, options.stages.schedule)?, Offload::Host),
            Self::Planned { row, .. } => return Ok(Pipeline::builder(layers).plan(&row)),
        };
        Ok(Pipeline::builder(layers).balance(balance).schedule(schedule).offload(offload))
    }
}

/// Returns the planner's question for a run.
fn question(
    device: Device,
    capacities: Vec<Bytes>,
    options: &TrainOptions,
    over: MeanOver,
    inputs: &MeasuredInputs,
    layers: &Layers,
) -> Result<OffloadQuestion> {
    let recipe = &options.recipe;
    let changes_gradients = recipe.clip_norm.is_some() || recipe.accumulate > 1;
    let is_divided_later = over != MeanOver::Samples;
    Ok(OffloadQuestion {
        device,
        looks_ahead: capacities.len() == 1
            && !options.stages.update_in_backward
            && !changes_gradients
            && !is_divided_later,
        capacities,
        kind: options.dtype().kind(),
        method: recipe.method(),
        loss,
        batch_size: inputs.batch_size,
        trained: trained_share(layers)?,
        kept_beside: usize::from(recipe.accumulate > 1) + usize::from(recipe.ema.is_some()),
        adapts: !matches!(options.size(), Size::Fixed(_) | Size::Count(_)),
        schedule: Schedule::OneFOneB,
        recompute: options.stages.recompute.unwrap_or(Recompute::Never),
    })
}

/// Returns the share of the parameters that is trained: with LoRA a small one.
fn trained_share(layers: &Layers) -> Result<f64> {
    let shapes = layers.variable_shapes()?;
    let numbers = |which: fn(&str) -> bool| -> i64 {
        let of_these = shapes.iter().filter(|(name, _)| which(name));
        of_these.map(|(_, shape)| shape.iter().product::<i64>()).sum()
    };
    let (added, all) = (numbers(Lora::is_adapter), numbers(|_| true));
    Ok(if added == 0 { 1.0 } else { added as f64 / all as f64 })
}

/// Returns whether offloading cannot be planned stage by stage: ranks and replicas would each measure their own plan,
/// while exact BatchNorms and a given schedule cut stages of their own.
fn is_all_or_nothing(world: &World, options: &TrainOptions) -> bool {
    world.size() * options.ranks.replicas > 1
        || options.batch_norm == Some(NormStatistics::Exact)
        || options.stages.schedule.is_some()
}

/// Returns the bytes of the weights, their gradients and the optimizer's state in this dtype.
fn resident_bytes(layers: &Layers, options: &TrainOptions, kind: Kind) -> Result<u64> {
    let weights = layers.parameter_count()? * kind.elt_size_in_bytes() as u64;
    Ok((weights as f64 * resident_factor(layers, options, kind)?) as u64)
}

/// Returns the bytes of weights, gradients and state for each byte of weights.
fn resident_factor(layers: &Layers, options: &TrainOptions, kind: Kind) -> Result<f64> {
    let of_trained = gradient_factor(kind) + options.recipe.method().state_factor_in(kind);
    Ok(1.0 + trained_share(layers)? * of_trained)
}

/// Least memory of a device for a model, without activations.
#[derive(Debug, Clone, Copy)]
pub(super) struct LeastBytes {
    /// Bytes of all weights, their gradients and the optimizer's state.
    pub(super) resident: u64,
    /// The same with the finest cut: of the largest layer.
    pub(super) of_stage: u64,
    /// Bytes when fully offloaded: the weights and gradients of the two largest layers, of which one computes while
    /// the other is in transfer.
    pub(super) offloaded: u64,
}

impl LeastBytes {
    pub(super) fn of(layers: &Layers, options: &TrainOptions, kind: Kind) -> Result<Self> {
        let mut bytes = parameters_used(layers)?;
        bytes.iter_mut().for_each(|numbers| *numbers *= kind.elt_size_in_bytes() as u64);
        bytes.sort_unstable_by(|a, b| b.cmp(a));
        let [largest, second] = [0, 1].map(|place| bytes.get(place).copied().unwrap_or(0));
        let with_gradients = 1.0 + trained_share(layers)? * gradient_factor(kind);
        Ok(Self {
            resident: resident_bytes(layers, options, kind)?,
            of_stage: (largest as f64 * resident_factor(layers, options, kind)?) as u64,
            offloaded: ((largest + second) as f64 * with_gradients) as u64,
        })
    }
}

/// Cut of a model into stages, and the schedule that runs them.
type StageCut = (BalanceBy, Schedule);

/// Cuts by the time that layers take for these inputs, all on their devices.
fn resident(
    layers: &Layers,
    devices: usize,
    options: &TrainOptions,
    inputs: &MeasuredInputs,
) -> Result<StageCut> {
    let schedule = options.stages.schedule.unwrap_or(Schedule::OneFOneB);
    let count = devices * schedule.stages_per_device();
    let fewer = match (options.stages.stages, schedule.stages_per_device()) {
        (None, _) => "start fewer ranks",
        (Some(_), 1) => "lower --stages",
        (Some(_), _) => "lower --stages, or take a --schedule with fewer on each device",
    };
    check_stages(count, layers.len(), "", fewer)?;
    if count == 1 {
        // The only stage has every layer, whatever they cost.
        return Ok(([layers.len()].into(), schedule));
    }
    let sample = typed(&inputs.micro_batch, options.dtype().kind());
    Ok((BalanceBy::by_time(&sample).optimizer(options.recipe.method()), schedule))
}

/// Cuts as finely as possible, unless the schedule gives the number of stages: a device buffer is as large as the
/// largest stage.
fn on_host(layers: &Layers, devices: usize, schedule: Option<Schedule>) -> Result<StageCut> {
    let counts = parameters_used(layers)?;
    let finest = balance::finest(&counts, counts.len())?.sizes().len();
    let stages_per_device = match schedule {
        Some(schedule) => schedule.stages_per_device(),
        None => (finest / devices).max(1),
    };
    let stages = devices * stages_per_device;
    check_stages(stages, finest, " with parameters", "lower --stages")?;
    let balance = balance::finest(&counts, stages)?.into();
    Ok((balance, schedule.unwrap_or(Schedule::BreadthFirst { stages_per_device })))
}

/// Checks that every stage gets a layer.
fn check_stages(stages: usize, layers: usize, of_a_kind: &str, fewer: &str) -> Result<()> {
    ensure_use!(
        stages <= layers,
        "{stages} stages need as many layers{of_a_kind}, but the model has {layers}: {fewer}"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::BrimfulArgs;

    /// Returns whether the planner may assume updates computed ahead, for this training with a mean over these
    /// targets.
    fn looks_ahead(words: &str, devices: usize, over: MeanOver) -> bool {
        let words = format!("brimful train --model mlp --optimizer adamw {words}");
        let options = BrimfulArgs::training(words.split_whitespace()).expect("a training");
        let number = || Tensor::from(0.0);
        let inputs = MeasuredInputs { micro_batch: number(), targets: number(), batch_size: 8 };
        let asked =
            question(Device::Cpu, vec![Bytes(0); devices], &options, over, &inputs, &Layers::new());
        asked.expect("a question").looks_ahead
    }

    #[test]
    fn updates_are_planned_ahead_where_a_step_takes_its_gradients_as_they_come() {
        assert!(looks_ahead("--offload auto", 1, MeanOver::Samples));
        assert!(!looks_ahead("--offload auto", 2, MeanOver::Samples), "others add to them");
        assert!(!looks_ahead("--offload auto", 1, MeanOver::Targets), "they are divided later");
        for flag in ["--clip-norm 1", "--accumulate 2", "--update-in-backward"] {
            assert!(
                !looks_ahead(&format!("--offload auto {flag}"), 1, MeanOver::Samples),
                "{flag}"
            );
        }
    }
}
