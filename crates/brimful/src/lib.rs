#![forbid(unsafe_code)]
//! Trains batches and models that are bigger than a device's memory, on libtorch through tch.

// The code that `#[derive(Batch)]` writes says `::brimful`, and is used in here too.
extern crate self as brimful;

mod accumulate;
pub mod auto;
pub mod balance;
pub mod batch;
pub mod bytes;
pub mod crew;
pub mod device;
mod error;
mod feed;
mod guard;
pub mod layers;
pub mod libtorch;
pub mod loss;
pub mod memory;
pub mod micro;
pub mod nn;
pub mod oom;
pub mod optim;
pub mod pipeline;
pub mod plan;
mod random;
mod ranks;
pub mod replicas;
pub mod save;
pub mod schedule;
pub mod split;
mod statistics;
pub mod world;

pub use auto::Auto;
pub use batch::{Batch, Shared};
pub use bytes::Bytes;
pub use error::{ClosureError, Error};
pub use guard::guard;
pub use layers::Layers;
pub use loss::Loss;
pub use micro::{MicroBatcher, Size, Step};
pub use pipeline::{Pipeline, is_recomputing};
pub use random::Draws;
pub use replicas::Replicas;
/// The tch whose tensors this library takes.
pub use tch;
pub use world::World;

/// The result of this library's calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;
