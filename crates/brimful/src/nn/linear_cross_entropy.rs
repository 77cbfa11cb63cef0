//! Fused head and cross-entropy, which computes large logits in chunks and never holds them all at once.

use brimful_torch::linear_cross_entropy::{self as torch, LossHead};
use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::loss::Loss;
use crate::memory::Memory;
use crate::nn::error::NnError;
use crate::nn::kernels::reported;
use brimful_plan::bytes::Bytes;

/// Default memory of a chunk's logits. Each chunk reads and writes the sum of the weight's gradient, so smaller
/// chunks are slower.
const CHUNK: Bytes = Bytes(256 << 20);
/// Divisor of a device's memory limit; the quotient is the largest chunk. Free memory would not do: it changes
/// from call to call, and with it the rounding of sums, so CUDA graphs would differ from eager runs.
const PART_OF_DEVICE: u64 = 16;

/// Settings of [`linear_cross_entropy`].
#[derive(Debug, Clone, Copy)]
pub struct LinearCrossEntropyConfig<'a> {
    /// Target of positions that do not count, such as padding.
    pub ignored: i64,
    /// Label smoothing: the part of each target that is spread over all classes; 0 for none.
    pub smoothing: f64,
    /// Weight of each class; 1 by default.
    pub class_weights: Option<&'a Tensor>,
    /// Memory limit of a chunk's logits, and of all logits beyond the size of the weight's gradient. By default
    /// 256 MiB, or a sixteenth of the process's limit on the device if that is less. Another chunk size changes
    /// the rounding of sums.
    pub chunk: Option<Bytes>,
}

impl Default for LinearCrossEntropyConfig<'_> {
    fn default() -> Self {
        Self { ignored: -100, smoothing: 0.0, class_weights: None, chunk: None }
    }
}

/// Computes the mean cross-entropy of the logits `hidden · weightᵀ + bias` over all targets that are not ignored,
/// weighted by [`class_weights`](LinearCrossEntropyConfig::class_weights) if there are any.
///
/// Hidden states have any shape … × width, the weight has classes × width (the table of an embedding, for a
/// tied head), and targets are integers of the shape …. Half precision is summed in f32. Do not change the hidden
/// states in place before the backward.
///
/// The logits are computed for a chunk of positions at a time, and their gradient at once, in the same memory. So
/// the memory shrinks from several times positions × classes to one chunk and the weight's gradient. If all logits
/// take no more memory than these two, and at most three times that of the weight's gradient, the gradient of the
/// logits is kept until the backward. The weight's gradient is then added directly to a step's sum, which is
/// faster.
///
/// ```
/// use brimful::nn::linear_cross_entropy;
/// use brimful::{MicroBatcher, MicroBatches};
/// use tch::{Device, Kind, Tensor, nn};
///
/// let store = nn::VarStore::new(Device::Cpu);
/// let table = store.root().randn_standard("table", &[1000, 16]);
/// let tokens = Tensor::randint(1000, [8, 33], (Kind::Int64, Device::Cpu));
/// let mut micro = MicroBatcher::new(&store, MicroBatches::Samples(2));
/// let step = micro.backward(&tokens, |tokens| {
///     let hidden = Tensor::embedding(&table, &tokens.narrow(1, 0, 32), -1, false, false);
///     linear_cross_entropy(&hidden, &table, None, &tokens.narrow(1, 1, 32), Default::default())
/// })?;
/// assert!(step.loss > 0.0);
/// # Ok::<(), brimful::Error>(())
/// ```
///
/// # Errors
///
/// When shapes, dtypes or devices do not match, a target on a CPU is out of range, the smoothing is not within
/// 0 and 1, or memory runs out.
pub fn linear_cross_entropy(
    hidden: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    targets: &Tensor,
    config: LinearCrossEntropyConfig<'_>,
) -> Result<Loss> {
    let given = Given { hidden, weight, bias, targets, config };
    given.check()?;
    let LinearCrossEntropyConfig { ignored, smoothing, class_weights, chunk } = config;
    let chunk_bytes = chunk.map_or_else(|| chunk_on(hidden.device()), Ok)?.0;
    let head = LossHead { weight, bias, class_weights, smoothing, ignored, chunk_bytes };
    let done = reported(torch::linear_cross_entropy(hidden, targets, head))?;
    Ok(Loss::ratio(done.sum, done.divisor))
}

fn chunk_on(on: Device) -> Result<Bytes> {
    if on == Device::Cpu {
        return Ok(CHUNK);
    }
    let limit = Memory::Accelerator(on).usage()?.limit.map_or(u64::MAX, |limit| limit.0);
    Ok(Bytes(CHUNK.0.min(limit / PART_OF_DEVICE).max(1)))
}

struct Given<'a> {
    hidden: &'a Tensor,
    weight: &'a Tensor,
    bias: Option<&'a Tensor>,
    targets: &'a Tensor,
    config: LinearCrossEntropyConfig<'a>,
}

impl Given<'_> {
    fn check(&self) -> Result<()> {
        let smoothing = self.config.smoothing;
        if !(0.0..=1.0).contains(&smoothing) {
            return Err(NnError::LossSmoothing(smoothing).into());
        }
        if self.config.chunk == Some(Bytes(0)) {
            return Err(NnError::LossChunk.into());
        }
        self.check_shapes()?;
        self.check_kinds()?;
        self.check_devices()?;
        self.check_targets()
    }

    fn check_shapes(&self) -> Result<()> {
        let hidden = self.hidden.size();
        let weight = self.weight.size();
        let wrong = |what, tensor: &Tensor| {
            let (shape, hidden, weight) = (tensor.size(), hidden.clone(), weight.clone());
            Err(NnError::LossShape { what, shape, hidden, weight }.into())
        };
        let Some((width, places)) = hidden.split_last() else {
            return wrong("the hidden state", self.hidden);
        };
        if weight.len() != 2 || weight[1] != *width || weight[0] == 0 || *width == 0 {
            return wrong("the weight", self.weight);
        }
        if self.targets.size() != places {
            return wrong("the tensor of targets", self.targets);
        }
        let of_classes =
            [("the bias", self.bias), ("the tensor of class weights", self.config.class_weights)];
        for (what, tensor) in of_classes {
            if let Some(other) = tensor.filter(|tensor| tensor.size() != weight[..1]) {
                return wrong(what, other);
            }
        }
        Ok(())
    }

    fn check_kinds(&self) -> Result<()> {
        let wrong = |what, wanted: &str, kind| {
            Err(NnError::LossKind { what, wanted: wanted.to_owned(), kind })
        };
        let real = "floating point";
        let kind = self.hidden.kind();
        if !is_real(kind) {
            wrong("the hidden state", real, kind)?;
        }
        for (what, tensor) in [("the weight", Some(self.weight)), ("the bias", self.bias)] {
            if let Some(other) = tensor.map(Tensor::kind).filter(|other| *other != kind) {
                wrong(what, &format!("of the hidden states' {kind:?}"), other)?;
            }
        }
        let targets = self.targets.kind();
        if !matches!(targets, Kind::Int64 | Kind::Int | Kind::Int16 | Kind::Int8 | Kind::Uint8) {
            wrong("the tensor of targets", "integers", targets)?;
        }
        match self.config.class_weights.map(Tensor::kind) {
            Some(kind) if !is_real(kind) => Ok(wrong("the tensor of class weights", real, kind)?),
            _ => Ok(()),
        }
    }

    fn check_devices(&self) -> Result<()> {
        let hidden = self.hidden.device();
        let others = [
            ("the weight", Some(self.weight)),
            ("the bias", self.bias),
            ("the tensor of targets", Some(self.targets)),
            ("the tensor of class weights", self.config.class_weights),
        ];
        for (what, tensor) in others {
            if let Some(on) = tensor.map(Tensor::device).filter(|on| *on != hidden) {
                return Err(NnError::LossDevice { what, on, hidden }.into());
            }
        }
        Ok(())
    }

    fn check_targets(&self) -> Result<()> {
        if self.targets.device() != Device::Cpu || self.targets.numel() == 0 {
            return Ok(());
        }
        let classes = self.weight.size()[0];
        let ignored = self.config.ignored;
        let targets = self.targets.f_to_kind(Kind::Int64)?.f_reshape([-1])?;
        let outside = targets.f_lt(0)?.f_logical_or(&targets.f_ge(classes)?)?;
        let wrong = outside.f_logical_and(&targets.f_ne(ignored)?)?;
        if wrong.f_any()?.f_int64_value(&[])? == 0 {
            return Ok(());
        }
        let place = wrong.f_to_kind(Kind::Int64)?.f_argmax(0, false)?.f_int64_value(&[])?;
        let target = targets.f_int64_value(&[place])?;
        Err(NnError::LossTarget { target, place, classes, ignored }.into())
    }
}

fn is_real(kind: Kind) -> bool {
    matches!(kind, Kind::Half | Kind::BFloat16 | Kind::Float | Kind::Double)
}
