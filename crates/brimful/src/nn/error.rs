//! Errors of the layers.

use tch::{Device, Kind};
use thiserror::Error;

use crate::batch::enumerate;
use crate::device;

/// An input that a layer or a head's loss cannot take.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum NnError {
    /// An input of another shape than a BatchNorm layer takes.
    #[error(
        "a BatchNorm layer of {channels} channels takes an input of {} dimensions with the channels \
         second, but got the shape {shape:?}",
        enumerate(dimensions)
    )]
    BatchNormShape {
        /// Numbers of dimensions that the layer takes.
        dimensions: &'static [usize],
        /// The layer's channels.
        channels: i64,
        /// The input's shape.
        shape: Vec<i64>,
    },
    /// An exact layer that `add_norm` did not add: only a pipeline can wait for the other micro-batches.
    #[error(
        "BatchNormPolicy::Exact normalises by the statistics of all micro-batches, which are known only to a \
         pipeline, and only for a layer that was added by `add_norm`:\n    \
         let layers = Layers::new().add(\"conv\", conv).add_norm(\"bn\", |p| batch_norm2d(p, \
         {channels}, exact)).add(\"rest\", rest);\n    \
         let mut pipe = Pipeline::builder(layers).micro_batches(MicroBatches::Samples(2)).build()?;\n    \
         pipe.backward(&x, &y, |out: Tensor, y| Loss::mean(out.cross_entropy_for_logits(y)))?;\n\
         In the closure of a `MicroBatcher` or of `Replicas`, use BatchNormPolicy::Deferred"
    )]
    NotAddedByNorm {
        /// The layer's channels.
        channels: i64,
    },
    /// An exact layer that normalises another tensor than the first input of its layer in the list.
    #[error(
        "a layer added by `add_norm` must normalise its first input unchanged, but this layer first made a \
         tensor of shape {shape:?} from it: do that in the layer before"
    )]
    ChangedInput {
        /// Shape of the input.
        shape: Vec<i64>,
    },
    /// An input that does not fit a LayerNorm or RMSNorm layer.
    #[error(
        "a norm of {width} columns takes an input of … × {width}, but got the shape {shape:?}{}",
        residual.as_ref().map(|shape| format!(" with a residual of {shape:?}")).unwrap_or_default()
    )]
    NormShape {
        /// Width of the layer's last dimension.
        width: i64,
        /// The input's shape.
        shape: Vec<i64>,
        /// The residual's shape, if there was one.
        residual: Option<Vec<i64>>,
    },
    /// Shapes that do not match.
    #[error(
        "a head's loss takes hidden states of … × width, a weight of classes × width and targets of \
         the shape …, but {what} has the shape {shape:?} where hidden states have {hidden:?} and the \
         weight {weight:?}"
    )]
    LossShape {
        /// Name of the tensor that does not fit.
        what: &'static str,
        /// Its shape.
        shape: Vec<i64>,
        /// Shape of the hidden states.
        hidden: Vec<i64>,
        /// Shape of the weight.
        weight: Vec<i64>,
    },
    /// Dtypes that do not match.
    #[error("linear cross-entropy: {what} must be {wanted}, not {kind:?}")]
    LossKind {
        /// Name of the tensor that does not fit.
        what: &'static str,
        /// Description of the right dtype.
        wanted: String,
        /// Dtype that it has.
        kind: Kind,
    },
    /// Tensors on several devices.
    #[error("{what} of a head's loss is on {}, the hidden states on {}: move it there",
        device::name(*on), device::name(*hidden))]
    LossDevice {
        /// Name of the tensor on another device.
        what: &'static str,
        /// Device of this tensor.
        on: Device,
        /// Device of the hidden states.
        hidden: Device,
    },
    /// A target that is not a class. Only targets on a CPU are checked: on other devices they make the loss
    /// NaN.
    #[error(
        "target {target} at position {place} is none of the {classes} classes, which are counted from 0: give a \
         class, or {ignored} to ignore the position"
    )]
    LossTarget {
        /// The target's value.
        target: i64,
        /// Its index among all targets.
        place: i64,
        /// Number of classes.
        classes: i64,
        /// Target of positions that are ignored.
        ignored: i64,
    },
    /// A smoothing outside 0 to 1.
    #[error("the smoothing cannot be {0}: give a number from 0 up to 1")]
    LossSmoothing(f64),
    /// A chunk of zero bytes.
    #[error("a chunk of 0 bytes holds no logits: give more, or `None` for an automatic size")]
    LossChunk,
}
