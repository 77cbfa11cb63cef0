#![forbid(unsafe_code)]
//! Trains batches and models that are bigger than a device's memory, on libtorch through tch.
//!
//! A mini-batch that does not fit is cut into micro-batches, which are streamed through the device; a model
//! that does not fit is cut into stages, each on a device of its own. The gradients are exactly those of the
//! whole mini-batch through the whole model.
//!
//! # A batch that does not fit
//!
//! In a training loop on tch, `loss.backward()` becomes [`MicroBatcher::backward`]:
//!
//! ```
//! use brimful::optim::{AdamW, Optimizer};
//! use brimful::{Loss, MicroBatcher, MicroBatches};
//! use tch::nn::{self, ModuleT};
//! use tch::{Device, Kind, Tensor};
//!
//! # let x = Tensor::randn([65, 8], (Kind::Float, Device::Cpu));
//! # let y = Tensor::randint(3, [65], (Kind::Int64, Device::Cpu));
//! # let loader = [(x, y)];
//! let store = nn::VarStore::new(Device::Cpu); // or Device::Cuda(0)
//! let model = nn::seq_t().add(nn::linear(store.root(), 8, 3, Default::default()));
//! let mut optimizer = Optimizer::new(&store, AdamW::new(1e-3))?;
//!
//! let mut micro = MicroBatcher::new(&store, MicroBatches::Auto);
//! for batch in loader {
//!     let step = micro.backward(&batch, |(x, y)| {
//!         Loss::mean(model.forward_t(&x, true).cross_entropy_for_logits(&y))
//!     })?;
//!     optimizer.step()?;
//!     optimizer.zero_grad()?;
//!     println!("loss {}, in micro-batches of {:?}", step.loss, step.sizes);
//! }
//! # Ok::<(), brimful::Error>(())
//! ```
//!
//! The closure receives each micro-batch on the model's device and returns a [`Loss`], which includes its
//! denominator: samples, tokens, class weights, or none.
//!
//! # A model that does not fit
//!
//! ```
//! use brimful::optim::Sgd;
//! use brimful::schedule::{Recompute, Schedule};
//! use brimful::{Layers, Loss, MicroBatches, Pipeline};
//! use tch::{Device, Kind, Tensor, nn};
//!
//! # let x = Tensor::randn([16, 8], (Kind::Float, Device::Cpu));
//! # let y = Tensor::randint(3, [16], (Kind::Int64, Device::Cpu));
//! let layers = Layers::new()
//!     .add("hidden", |p| nn::linear(p, 8, 64, Default::default()))
//!     .add_fn("relu", |x| x.relu())
//!     .add("output", |p| nn::linear(p, 64, 3, Default::default()));
//! let mut pipe = Pipeline::builder(layers)
//!     .devices([Device::Cpu, Device::Cpu]) // or Device::Cuda(0), Device::Cuda(1)
//!     .micro_batches(MicroBatches::Count(4))
//!     .schedule(Schedule::OneFOneB)
//!     .recompute(Recompute::ExceptLast)
//!     .build()?;
//! let mut optimizer = pipe.optimizer(Sgd::new(0.1))?;
//! let step = pipe.backward(&x, &y, |out: Tensor, y| Loss::mean(out.cross_entropy_for_logits(y)))?;
//! optimizer.step()?;
//! # Ok::<(), brimful::Error>(())
//! ```
//!
//! # Choosing an API
//!
//! | task | API |
//! | --- | --- |
//! | train with a batch that does not fit | [`MicroBatcher`], [`MicroBatches`] |
//! | make a batch of a struct | [`Batch`], by derive |
//! | set the denominator of a loss | [`Loss`] |
//! | train with contrastive and other whole-batch losses | [`MicroBatcher::backward_whole`] |
//! | accumulate a step over several mini-batches | [`MicroBatcher::accumulate`], [`Pipeline::accumulate`] |
//! | find the micro-batch size automatically | [`MicroBatches::Auto`], [`mod@auto`] |
//! | make small micro-batches fast on CUDA, with CUDA graphs | [`MicroBatcher::cuda_graphs`] |
//! | train on several devices, each with the whole model | [`Replicas`] |
//! | spread a model over devices, or offload it to the host | [`Layers`], [`Pipeline`] |
//! | train several such pipelines, data-parallel | [`pipeline::Builder::replicas`] |
//! | train over several processes or machines | [`World`], with the feature `mpi` |
//! | choose balance, schedule and micro-batches before anything runs | [`mod@plan`] |
//! | inspect a schedule, or write one | [`schedule`] |
//! | update parameters, and save the optimizer's state | [`optim`] |
//! | compute BatchNorm statistics of the whole mini-batch | [`nn`] |
//! | count and limit memory, on a CPU too | [`memory`] |
//! | save and load models | [`save`], [`Pipeline::save`] |
//!
//! # Promises
//!
//! - *Transparent.* Gradients, loss and parameters after a step equal those of the plain model on the
//!   whole mini-batch: to 1e-10 in f64, 1e-5 in f32.
//! - *Atomic.* A step that fails leaves gradients, BatchNorm statistics, random state and optimizer as they
//!   were. A step that was retried equals the step without the failure.
//! - *Bounded.* Device memory depends on the micro-batch and the stage, not on the mini-batch.
//! - *No hang.* A panic, an error or out-of-memory in any stage ends the step with an error that names the
//!   stage; the pipeline remains usable.
//! - *Split-independent.* Saved models are plain safetensors with the layers' own names.
//! - *No silent changes.* All decisions on the user's behalf are in the step's report and in a log line of
//!   `tracing`.
//!
//! # Restrictions
//!
//! - In training, BatchNorm normalises each micro-batch by its own statistics ([`nn`]).
//! - Dropout masks depend on the cut.
//! - Linux on x86-64, with libtorch 2.11.0.
//!
//! # Features
//!
//! - `download-libtorch` fetches libtorch during the build. Without it, set `LIBTORCH` to its folder, or
//!   `LIBTORCH_USE_PYTORCH=1` to use an installed PyTorch 2.11.
//! - `mpi` connects processes by the installed MPI ([`World`]); it needs MPI's headers and libclang.
//! - `doc-only` builds these pages without libtorch.

// The code of `#[derive(Batch)]` names `::brimful`, and is used in this crate too.
extern crate self as brimful;

mod accumulate;
pub mod auto;
pub mod balance;
pub mod batch;
pub mod device;
mod error;
mod feed;
pub mod layers;
pub mod libtorch;
pub mod loss;
mod measure;
pub mod memory;
mod memory_format;
pub mod micro;
pub mod nn;
mod oom;
pub mod optim;
pub mod pipeline;
pub mod plan;
mod random;
mod ranks;
pub mod replicas;
mod retry_on_oom;
pub mod save;
pub mod schedule;
mod statistics;
mod step;
mod streams;
mod update;
mod workers;
pub mod world;

pub use batch::{Batch, Shared};
pub use brimful_plan::bytes::Bytes;
pub use error::{ClosureError, Error};
pub use layers::Layers;
pub use loss::{IntoLoss, Loss};
pub use micro::MicroBatcher;
pub use pipeline::{Pipeline, is_recomputing};
pub use random::StepRng;
pub use replicas::Replicas;
pub use retry_on_oom::retry_on_oom;
pub use step::{MicroBatches, NonFinitePolicy, StepError, StepReport, Timeline};
/// The version of tch whose tensors this library takes.
pub use tch;
pub use workers::DeviceSpec;
pub use world::World;

/// Items for this project's program, benchmarks and tests; not part of the API.
#[doc(hidden)]
pub mod internal {
    pub use crate::accumulate::{gradient_factor, sums_apart};
    pub use crate::memory::devices::{DeviceInfo, devices};
    pub use crate::oom::{Caught, catch, recognise, without_remedy};
    pub use crate::pipeline::{
        OffloadPlan, free_host_bytes, is_offloadable, measure_host_link, trained_share,
    };
    pub use crate::save::opened::OpenedFile;
}

/// Result of this library's calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;
