//! Layers that know of micro-batches.

mod batch_norm;

pub use batch_norm::{
    BatchNorm, BatchNormConfig, BatchNormPolicy, batch_norm1d, batch_norm2d, batch_norm3d,
};
