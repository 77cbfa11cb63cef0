#![forbid(unsafe_code)]
//! Trains batches and models that are bigger than a device's memory, on libtorch through tch.

pub mod bytes;
pub mod device;
mod error;
pub mod libtorch;
pub mod memory;
pub mod oom;
pub mod optim;
pub mod save;

pub use bytes::Bytes;
pub use error::Error;

/// The result of this library's calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;
