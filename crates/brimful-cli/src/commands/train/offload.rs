//! Offloading of some or all stages of a model to the host: the values of `--offload`, and the decision by the
//! model's bytes and the memory of the devices.

use anyhow::Result;
use brimful::balance;
use brimful::internal::{OffloadPlan, gradient_factor, is_offloadable, trained_share};
use brimful::pipeline::{BalanceBy, Builder, Offload};
use brimful::schedule::Schedule;
use brimful::{Layers, Pipeline, World};
use clap::ValueEnum;
use tch::{Device, Kind, Tensor};

use super::TrainOptions;
use super::engine;
use crate::exit::{ensure_use, ran_out};
use crate::progress::begin_measuring;
use crate::setting::{NormStatistics, capacity, loss, shown_as_given, typed};

/// Value of `--offload`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OffloadArgument {
    /// As much as needed
    Auto,
    /// Nothing
    None,
    /// Everything
    All,
}

shown_as_given!(OffloadArgument);

/// Inputs to measure layers with.
#[derive(Debug)]
pub(super) struct MeasuredInputs {
    /// Inputs of one micro-batch. If micro-batch sizes are automatic, the size here is a guess.
    pub(super) micro_batch: Tensor,
    /// Targets of these inputs.
    pub(super) targets: Tensor,
    /// Samples in a mini-batch.
    pub(super) batch_size: usize,
}

/// Decides what to offload, for pipelines of `devices` devices. Collective: every rank takes part.
pub(super) fn settle(
    layers: &Layers,
    devices: usize,
    world: &World,
    options: &TrainOptions,
    inputs: impl FnOnce() -> Result<MeasuredInputs>,
) -> Result<OffloadPlan> {
    match options.stages.offload {
        OffloadArgument::None => return Ok(OffloadPlan::Device),
        OffloadArgument::All => return Ok(OffloadPlan::Host),
        OffloadArgument::Auto => {}
    }
    let device = options.devices(world, 1)?[0];
    let here = capacity(device, options.memory_limit)?.map(|capacity| capacity.0);
    // All ranks use the least capacity of any rank, so that all make the same decision.
    let capacities = world.share("capacity", &here)?;
    let Some(capacity) = capacities.into_iter().flatten().min() else {
        return Ok(OffloadPlan::Device);
    };
    let needed = resident_bytes(layers, options, options.dtype().kind())?;
    let capacity_of_all = capacity.saturating_mul(devices as u64);
    // Measures no layers if there is plenty of memory.
    if needed <= capacity_of_all / 2 {
        return Ok(OffloadPlan::Device);
    }
    // A model that does not fit even if offloaded stays on its devices, and fails there with a more precise error.
    let fits_offloaded = options.stages.schedule.is_none_or(is_offloadable)
        && LeastBytes::of(layers, options, options.dtype().kind())?.offloaded <= capacity;
    let all = || if fits_offloaded { OffloadPlan::Host } else { OffloadPlan::Device };
    let all_or_nothing = || if needed <= capacity_of_all { OffloadPlan::Device } else { all() };
    if is_all_or_nothing(world, options) {
        return Ok(all_or_nothing());
    }
    match plan(layers, device, world, options, &inputs()?) {
        Ok(OffloadPlan::Host) => Ok(all()),
        Err(error) if ran_out(&error) => Ok(all_or_nothing()),
        planned => planned,
    }
}

/// Measures the layers, and plans which stages to offload.
fn plan(
    layers: &Layers,
    device: Device,
    world: &World,
    options: &TrainOptions,
    inputs: &MeasuredInputs,
) -> Result<OffloadPlan> {
    let recipe = &options.recipe;
    let copies = usize::from(recipe.accumulate > 1) + usize::from(recipe.ema.is_some());
    let sample = (&inputs.micro_batch, &inputs.targets);
    let builder = engine::set_up(Pipeline::builder(layers.clone()), world, options)?
        .offload(Offload::Auto { gpu: None, host: None })
        .sample(sample, loss, inputs.batch_size);
    Ok(builder.plan_offload(copies, begin_measuring(layers.len() + 1, device))?)
}

/// Makes a builder of a pipeline over `devices` devices, balanced and offloaded as decided.
pub(super) fn builder(
    plan: OffloadPlan,
    layers: Layers,
    devices: usize,
    options: &TrainOptions,
    inputs: impl FnOnce() -> Result<MeasuredInputs>,
) -> Result<Builder> {
    Ok(match plan {
        OffloadPlan::Host => {
            let schedule = options.stages.schedule;
            check_offloaded_stages(&layers, devices, schedule)?;
            let builder = Pipeline::builder(layers).offload(Offload::Host);
            schedule.into_iter().fold(builder, Builder::schedule)
        }
        OffloadPlan::Planned { row, .. } => Pipeline::builder(layers).plan(&row),
        _ => {
            let (balance, schedule) = resident(&layers, devices, options, &inputs()?)?;
            Pipeline::builder(layers).balance(balance).schedule(schedule)
        }
    })
}

/// Returns whether only all layers or none can be offloaded. With several ranks or replicas, each would measure
/// its own plan. With exact BatchNorms or a given schedule, a plan may not choose the stages.
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
    /// Bytes of the largest layer, its gradients and its optimizer state: the largest stage of the finest cut.
    pub(super) of_stage: u64,
    /// Bytes when fully offloaded. These are the weights and gradients of the two largest layers, because one
    /// layer computes while the other is transferred. The update adds gradients and optimizer state of the largest
    /// layer.
    pub(super) offloaded: u64,
}

impl LeastBytes {
    pub(super) fn of(layers: &Layers, options: &TrainOptions, kind: Kind) -> Result<Self> {
        let mut bytes = layers.parameters_used()?;
        bytes.iter_mut().for_each(|numbers| *numbers *= kind.elt_size_in_bytes() as u64);
        bytes.sort_unstable_by(|a, b| b.cmp(a));
        let [largest, second] = [0, 1].map(|place| bytes.get(place).copied().unwrap_or(0));
        let with_gradients = 1.0 + trained_share(layers)? * gradient_factor(kind);
        Ok(Self {
            resident: resident_bytes(layers, options, kind)?,
            of_stage: (largest as f64 * resident_factor(layers, options, kind)?) as u64,
            offloaded: ((largest + second) as f64 * with_gradients
                + largest as f64 * (resident_factor(layers, options, kind)? - 1.0))
                as u64,
        })
    }
}

/// Cut of a model into stages, and the schedule that runs them.
type StageCut = (BalanceBy, Schedule);

/// Balances resident stages by the times of their layers for these inputs.
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
        (Some(_), _) => "lower --stages, or give a --schedule with fewer stages per device",
    };
    check_stages(count, layers.len(), "", fewer)?;
    if count == 1 {
        // A single stage has every layer, whatever the layers cost.
        return Ok(([layers.len()].into(), schedule));
    }
    let sample = typed(&inputs.micro_batch, options.dtype().kind());
    Ok((BalanceBy::by_time(&sample).optimizer(options.recipe.method()), schedule))
}

/// Checks that every offloaded stage gets a layer that has parameters.
fn check_offloaded_stages(
    layers: &Layers,
    devices: usize,
    schedule: Option<Schedule>,
) -> Result<()> {
    let counts = layers.parameters_used()?;
    let finest = balance::finest(&counts, counts.len())?.sizes().len();
    let stages = devices * schedule.map_or(1, Schedule::stages_per_device);
    check_stages(stages, finest, " with parameters", "lower --stages")
}

/// Checks that every stage gets a layer.
fn check_stages(stages: usize, layers: usize, of_a_kind: &str, fewer: &str) -> Result<()> {
    ensure_use!(
        stages <= layers,
        "{stages} stages need as many layers{of_a_kind}, but the model has {layers}: {fewer}"
    );
    Ok(())
}
