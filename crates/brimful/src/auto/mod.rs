//! Automatic micro-batch sizes: predict what fits, survive out of memory, never change the batch.
//!
//! ```text
//!   kind ──► sizer ──► policy (P)        the next size: probe, climb, settle; `failures` its ceiling
//!              │          └─► trial     what it answers
//!              ├─────► memory_model (P)  what a size needs, from what others needed
//!              └─────► rates (P)         how fast each size was
//!   log        what was decided for a step, and how often it was run again
//!   room       what is free for a step
//!   stopwatch  how long its micro-batches took
//!   remembered what earlier runs have found
//!   watch      a try at work: what it needed and how long it took, in one memory or several
//! ```
//!
//! [`MicroBatcher`](crate::MicroBatcher) asks for a size before each piece of a mini-batch, tells
//! what it needed and how long it took, and runs the mini-batch again where memory ran out.
//!
//! ```
//! use brimful::memory::{Arena, Memory};
//! use brimful::{Loss, MicroBatcher, Size};
//! use tch::nn::{self, Module};
//! use tch::{Device, Kind, Tensor};
//!
//! let store = nn::VarStore::new(Device::Cpu);
//! let model = nn::linear(store.root(), 1000, 1000, Default::default());
//! let memory = Memory::Arena(Arena::limited("small", 16 << 20)?);
//! let mut micro = MicroBatcher::new(&store, Size::Largest).memory(memory);
//!
//! let batch = Tensor::randn([4096, 1000], (Kind::Float, Device::Cpu));
//! let step = micro.backward(&batch, |x| Loss::mean(model.forward(&x).square().mean(Kind::Float)))?;
//! assert_eq!((step.samples, step.retries), (4096, 0));
//! for decision in &step.decisions {
//!     println!("{decision}"); // micro-batches of 2 (small, to see what a sample needs; …
//! }
//! # Ok::<(), brimful::Error>(())
//! ```

mod decision;
mod error;
mod failures;
mod kind;
mod log;
mod memory_model;
mod policy;
mod rates;
mod remembered;
mod room;
mod sizer;
mod sizes;
mod stopwatch;
#[cfg(test)]
mod tests;
mod trial;
mod watch;

pub use decision::{Decision, Why};
pub use error::DoesNotFit;
pub(crate) use kind::{Kind, Use};
pub(crate) use log::SizeLog;
pub(crate) use policy::Goal;
pub(crate) use remembered::{Identity, hash_of, hash_of_variables};
pub(crate) use sizer::FEW_SAMPLES;
pub(crate) use sizes::Sizes;
pub(crate) use watch::{Ending, Peaks, SizeWatch};
