#![forbid(unsafe_code)]
//! Trains batches and models that are bigger than a device's memory, on libtorch through tch.

// The code that `#[derive(Batch)]` writes says `::brimful`, and is used in here too.
extern crate self as brimful;

pub mod batch;
pub mod bytes;
pub mod device;
mod error;
pub mod layers;
pub mod libtorch;
pub mod memory;
pub mod oom;
pub mod split;

pub use batch::{Batch, Shared};
pub use bytes::Bytes;
pub use error::Error;
pub use layers::Layers;
/// The tch whose tensors this library takes.
pub use tch;

/// The result of this library's calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;
