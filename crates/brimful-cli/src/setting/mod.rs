//! Settings that several commands share, such as model and dtype, with the functions that apply them.

mod loss_model;
mod model;
pub mod words;

use anyhow::{Result, ensure};
use brimful::memory::{Arena, Memory};
use brimful::nn::BatchNormPolicy;
use brimful::{Bytes, Loss, MicroBatches, World, device};
use brimful_torch::autograd;
use clap::{Args, ValueEnum};
use serde::Serialize;
use tch::nn::VarStore;
use tch::{Device, Kind, Reduction, Tensor};

use crate::data::IGNORED;
use crate::exit::ensure_use;

pub use crate::model::ModelSource;
pub use loss_model::LossModel;
pub(crate) use model::{
    ANY_MODEL, ANY_MODELS, DROPOUT, IMAGE_MODELS, MODEL, SEQUENCE, TEXT_MODELS,
};
pub use model::{MODELS, ModelName};
pub use words::{recompute, schedule};

/// Implements `Display` as the value on the command line.
macro_rules! shown_as_given {
    ($choice:ty) => {
        impl std::fmt::Display for $choice {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let value = clap::ValueEnum::to_possible_value(self);
                f.write_str(value.as_ref().map_or("", |value| value.get_name()))
            }
        }
    };
}
pub(crate) use shown_as_given;

/// Returns the device with this name, or without a name the best device.
pub fn device(name: Option<&str>) -> Result<Device> {
    Ok(name.map_or_else(|| Ok(device::best()), device::find)?)
}

/// Returns the default value of flags that name devices.
pub fn best_devices() -> &'static str {
    if device::best().is_cuda() { "cuda" } else { "cpu" }
}

/// Returns the device with this name for a rank. For `cuda`, the ranks of a host get different GPUs, if there are
/// enough.
pub fn device_of(name: &str, world: &World) -> Result<Device> {
    let place = world.rank_on_host();
    Ok(device::spread(name, place..place + 1)?[0])
}

/// Returns the mean loss of logits. If the targets are integers (classes or tokens), the loss is the cross-entropy
/// over the last dimension. If they are floats (masks), it is the binary cross-entropy of each pixel. Half
/// precision is summed in f32.
pub fn loss(logits: &Tensor, targets: &Tensor) -> Tensor {
    let logits = summable(logits);
    if targets.is_floating_point() {
        let targets = targets.to_kind(logits.kind());
        let none = None::<&Tensor>;
        return logits.binary_cross_entropy_with_logits(&targets, none, none, Reduction::Mean);
    }
    let (logits, targets) = (logits.flatten(0, -2), targets.flatten(0, -1));
    logits.cross_entropy_loss(&targets, None::<&Tensor>, Reduction::Mean, IGNORED, 0.0)
}

/// Converts logits of half precision to f32, because a sum of losses in bf16 has only two correct digits.
pub(crate) fn summable(logits: &Tensor) -> Tensor {
    match logits.kind() {
        Kind::BFloat16 | Kind::Half => logits.to_kind(Kind::Float),
        _ => logits.shallow_clone(),
    }
}

/// Unit that the loss of a mini-batch is a mean over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MeanOver {
    /// Samples, which all have the same number of targets.
    Samples,
    /// Targets that are not ignored.
    Targets,
}

/// Returns the loss of logits, as a mean over samples or over targets.
pub(crate) fn mean_loss(logits: &Tensor, targets: &Tensor, over: MeanOver) -> Loss {
    let mean = loss(logits, targets);
    match over {
        MeanOver::Samples => Loss::mean(mean),
        MeanOver::Targets => Loss::mean_over(mean, counted(targets)),
    }
}

/// Counts the targets that are not ignored.
pub(crate) fn counted(targets: &Tensor) -> Tensor {
    targets.ne(IGNORED).sum(Kind::Double)
}

/// Returns for each sample, token or pixel whether its prediction is right.
pub(crate) fn right(logits: &Tensor, targets: &Tensor) -> Tensor {
    if targets.is_floating_point() {
        return logits.gt(0.0).eq_tensor(&targets.gt(0.5));
    }
    logits.argmax(-1, false).eq_tensor(targets)
}

/// Refuses non-finite outputs, which a model with broken weights can have.
pub(crate) fn check_answers(answers: &Tensor) -> Result<()> {
    ensure!(
        bool::try_from(answers.f_isfinite()?.f_all()?)?,
        "the model's outputs are not finite: its weights may be broken"
    );
    Ok(())
}

/// Clears the gradients of all parameters.
pub fn clear_gradients(store: &VarStore) -> Result<()> {
    let mut parameters = store.trainable_variables();
    Ok(parameters.iter_mut().try_for_each(|p| autograd::set_gradient(p, None))?)
}

/// Converts inputs to the model's dtype; token numbers stay integers.
pub(crate) fn typed(inputs: &Tensor, kind: Kind) -> Tensor {
    if inputs.is_floating_point() { inputs.to_kind(kind) } else { inputs.shallow_clone() }
}

/// Precision of a model's parameters and activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum NumberType {
    F64,
    F32,
    /// f32, with matrix products in TF32 on CUDA
    Tf32,
    /// Parameters and activations in bf16
    Bf16,
}

impl NumberType {
    pub fn kind(self) -> Kind {
        match self {
            Self::F64 => Kind::Double,
            Self::F32 | Self::Tf32 => Kind::Float,
            Self::Bf16 => Kind::BFloat16,
        }
    }

    /// Returns the dtype to compute in with weights that are stored as `kind`. Weights in f16 become f32.
    pub(crate) fn holding(kind: Kind) -> Self {
        match kind {
            Kind::Double => Self::F64,
            Kind::BFloat16 => Self::Bf16,
            _ => Self::F32,
        }
    }

    /// Allows or forbids TF32 on CUDA, as this dtype requires, in the whole process.
    pub fn prepare(self, device: Device) -> Result<()> {
        ensure_use!(
            device != Device::Cpu || self != Self::Tf32,
            "--dtype tf32 is for CUDA devices: use --dtype f32 on the CPU"
        );
        Ok(device::allow_tf32(matches!(self, Self::Tf32 | Self::Bf16))?)
    }
}

shown_as_given!(NumberType);

/// Returns the memory of each device with this limit. Each CPU device gets its own arena.
pub fn accounts(devices: &[Device], limit: Option<Bytes>) -> Result<Vec<Memory>> {
    let account = |(number, device): (usize, &Device)| {
        let memory = match device {
            Device::Cpu => Memory::Arena(Arena::new(&format!("device {number}"))),
            accelerator => Memory::of(*accelerator)?,
        };
        within(memory, limit)
    };
    devices.iter().enumerate().map(account).collect()
}

/// Sets this limit on the memory, if there is one.
pub fn within(memory: Memory, limit: Option<Bytes>) -> Result<Memory> {
    if let Some(limit) = limit {
        memory.set_limit(Some(limit.0))?;
    }
    Ok(memory)
}

/// Returns the bytes that a model may use on the device, or none for a CPU without a limit.
pub fn capacity(device: Device, limit: Option<Bytes>) -> Result<Option<Bytes>> {
    match device {
        Device::Cpu => Ok(limit),
        accelerator => Ok(within(Memory::of(accelerator)?, limit)?.usage()?.available),
    }
}

/// Statistics that BatchNorms normalise with in training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum NormStatistics {
    /// Statistics of the whole mini-batch, whatever the micro-batch size; one device only
    Exact,
    /// Statistics of each micro-batch; running statistics are updated once per step
    Deferred,
    /// Statistics of each micro-batch; running statistics are updated at every micro-batch
    PerMicroBatch,
    /// Running statistics, which are not updated
    Frozen,
}

shown_as_given!(NormStatistics);

impl NormStatistics {
    pub fn policy(self) -> BatchNormPolicy {
        match self {
            Self::Exact => BatchNormPolicy::Exact,
            Self::Deferred => BatchNormPolicy::Deferred,
            Self::PerMicroBatch => BatchNormPolicy::PerMicroBatch,
            Self::Frozen => BatchNormPolicy::Frozen,
        }
    }
}

/// Device, memory and micro-batches of an evaluation.
#[derive(Debug, Args)]
pub(crate) struct EvaluationPlace {
    #[arg(long, default_value = "auto", value_name = "N", help = words::ANY_MICRO_BATCH)]
    #[arg(value_parser = words::micro_batch)]
    pub(crate) micro_batch_size: MicroBatches,
    #[arg(long, value_name = "BYTES", help = words::MEMORY_LIMIT)]
    memory_limit: Option<Bytes>,
    #[arg(long, value_name = "NAME", help = words::ANY_DEVICE)]
    device: Option<String>,
}

impl EvaluationPlace {
    /// Returns the chosen device.
    pub(crate) fn device(&self) -> Result<Device> {
        device(self.device.as_deref())
    }

    /// Returns the memory of this device, with the limit of `--memory-limit` set.
    pub(crate) fn memory(&self, device: Device) -> Result<Memory> {
        within(Memory::of(device)?, self.memory_limit)
    }
}
