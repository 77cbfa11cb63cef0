//! Layers: BatchNorm for micro-batches, alone or fused with a ReLU; fused norms and activations of transformers;
//! projections with or without LoRA; a head fused with its loss.
//!
//! In training every micro-batch is normalised by its own statistics, because the mini-batch's statistics are
//! known only after its last sample. Only [`BatchNormPolicy::Exact`] waits for that sample. Evaluation uses the
//! running statistics, which by default are those of the whole mini-batch:
//!
//! ```
//! use brimful::nn::batch_norm1d;
//! use brimful::{Loss, MicroBatcher, MicroBatches};
//! use tch::nn::{ModuleT, VarStore};
//! use tch::{Device, Kind, Tensor};
//!
//! let x = Tensor::randn([10, 3], (Kind::Double, Device::Cpu));
//! let running_mean = |size| {
//!     let mut store = VarStore::new(Device::Cpu);
//!     let norm = batch_norm1d(store.root(), 3, Default::default());
//!     store.double();
//!     let mut micro = MicroBatcher::new(&store, MicroBatches::Samples(size));
//!     micro.backward(&x, |x| Loss::mean(norm.forward_t(&x, true).mean(Kind::Double)))?;
//!     Ok::<_, brimful::Error>(store.variables()["running_mean"].copy())
//! };
//! assert!(running_mean(4)?.allclose(&running_mean(10)?, 1e-10, 1e-12, false));
//! # Ok::<(), brimful::Error>(())
//! ```

mod activation;
mod batch_norm;
mod embedding;
mod error;
mod exact;
mod first_values;
pub mod kernels;
mod linear_cross_entropy;
mod lora;
mod norm;
mod projection;
mod rotary;

pub use activation::{bias_gelu, bias_gelu_tanh, bias_swiglu};
pub use batch_norm::{
    BatchNorm, BatchNormConfig, BatchNormPolicy, batch_norm1d, batch_norm2d, batch_norm3d,
    f_second_use, second_use,
};
pub use embedding::embedding;
pub use error::NnError;
pub(crate) use exact::{ExactNorm, NormStatistics, WholeBatchNorm, built_in};
pub(crate) use first_values::in_kind;
pub use first_values::spread_weight;
pub use linear_cross_entropy::{LinearCrossEntropyConfig, linear_cross_entropy};
pub use lora::Lora;
pub use norm::{Norm, layer_norm, layer_norm_with, rms_norm, rms_norm_with};
pub use projection::{Projection, ProjectionConfig};
pub use rotary::Rotary;
