//! Automatic micro-batch sizes: predict what fits, survive out of memory, never change the batch.
//!
//! ```text
//!   sizes ──► sizer ──► policy (P)        the next size: probe, climb, choose; a ceiling after failures
//!               │          └─► decision  its answer, and the reason
//!               ├─────► memory_model (P)  need of a size, predicted from others
//!               └─────► rates             rate of each size, and times of micro-batches
//!   sizes   a sizer for each kind of mini-batch, and sizes found by earlier runs
//!   watch   need and time of an attempt, in one memory or several
//!
//!   (P) pure: numbers in, numbers out, without tensors or devices
//! ```
//!
//! [`MicroBatcher`](crate::MicroBatcher) asks for a size before each piece of a mini-batch, reports the piece's
//! need and time, and retries the mini-batch if memory runs out.
//!
//! ```
//! use brimful::memory::{Arena, Memory};
//! use brimful::{Loss, MicroBatcher, MicroBatches};
//! use tch::nn::{self, Module};
//! use tch::{Device, Kind, Tensor};
//!
//! let store = nn::VarStore::new(Device::Cpu);
//! let model = nn::linear(store.root(), 1000, 1000, Default::default());
//! let memory = Memory::Arena(Arena::limited("small", 16 << 20)?);
//! let mut micro = MicroBatcher::new(&store, MicroBatches::Largest).memory(memory);
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
mod memory_model;
mod policy;
mod rates;
mod sizer;
mod sizes;
#[cfg(test)]
mod tests;
mod watch;

pub use decision::{Decision, Why};
pub(crate) use policy::Goal;
pub(crate) use sizer::{FEW_SAMPLES, SizeLog};
pub(crate) use sizes::{Identity, Kind, Sizes, Use, hash_of, hash_of_variables};
pub(crate) use watch::{Ending, Peaks, SizeWatch};
