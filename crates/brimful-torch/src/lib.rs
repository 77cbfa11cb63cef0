//! Safe wrappers for the libtorch calls that tch lacks. All C++ and all unsafe code of brimful are in this crate.
//!
//! | module | adds to tch |
//! | --- | --- |
//! | [`activation`] | fused bias and activation |
//! | [`arena`] | CPU memory accounting, with a limit |
//! | [`autograd`] | backward from given gradients; assignment of gradients |
//! | [`batch_norm`] | BatchNorm fused with the operations that follow it |
//! | [`cuda`] | CUDA loaded at run time, where present |
//! | [`device`] | device synchronisation |
//! | [`foreach`] | one operation on many tensors at once |
//! | [`gradients`] | gradients moved from parameters into sums |
//! | [`graph`] | CUDA graphs: work captured once and replayed |
//! | [`host`] | freed host blocks kept for reuse; huge pages |
//! | [`kernels`] | custom kernels, and a switch for them |
//! | [`memory_format`] | memory format: contiguous or channels last |
//! | [`leaves`] | leaves that a backward may add to, and others that it would reach |
//! | [`linear_cross_entropy`] | a linear layer and its cross-entropy, without storing large logits whole |
//! | [`mapped`] | tensor data read directly from a file |
//! | [`memory`] | an accelerator's memory statistics, cache and limit |
//! | `mpi` | messages between processes, with the feature `mpi` |
//! | [`meta`] | tensors with a shape and no memory |
//! | [`norm`] | LayerNorm and RMSNorm, with a fused residual addition |
//! | [`optim`] | optimizer steps |
//! | [`projection`] | linear layers and embeddings whose gradients go directly into sums |
//! | [`random`] | a generator's state, saved and restored; a thread-local generator |
//! | [`rotary`] | rotary position embedding |
//! | [`host_buffer`] | pinned host buffers |
//! | [`split_backward`] | a backward in two parts: input gradients (dX), then weight gradients (dW) |
//! | [`stream`], [`transfer`] | streams, events, asynchronous copies |
//! | [`touched`] | memory that a piece of work reads and writes |
//! | [`threads`] | intra-op thread count of one thread |
//! | [`libtorch`] | the running libtorch |

pub mod activation;
pub mod arena;
mod at_end;
pub mod autograd;
pub mod batch_norm;
pub mod cuda;
mod cuda_object;
pub mod device;
mod error;
mod ffi;
pub mod foreach;
pub mod grad_mode;
pub mod gradients;
pub mod graph;
pub mod host;
pub mod host_buffer;
pub mod kernels;
pub mod leaves;
pub mod libtorch;
pub mod linear_cross_entropy;
pub mod mapped;
pub mod memory;
pub mod memory_format;
pub mod meta;
#[cfg(feature = "mpi")]
pub mod mpi;
pub mod norm;
pub mod optim;
pub mod projection;
pub mod random;
mod replaced;
pub mod rotary;
pub mod split_backward;
pub mod stream;
pub mod threads;
pub mod touched;
pub mod transfer;

pub use error::{ErrorKind, TorchError};

use ffi::RawTensor;
use tch::Tensor;

fn raw(tensor: &Tensor) -> *const RawTensor {
    tensor.as_ptr().cast()
}

/// Returns null for `None`.
fn raw_or_null(tensor: Option<&Tensor>) -> *const RawTensor {
    tensor.map_or(std::ptr::null(), raw)
}

/// Returns a mutable pointer, for calls that change the underlying tensor. tch's own calls also do that through
/// `&Tensor`.
fn raw_mut(tensor: &Tensor) -> *mut RawTensor {
    tensor.as_ptr().cast_mut().cast()
}

fn raw_list<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> Vec<*const RawTensor> {
    tensors.into_iter().map(raw).collect()
}

/// Takes ownership of a tensor that the bridge created.
fn owned(tensor: *mut RawTensor) -> Tensor {
    // SAFETY: the bridge returns a heap-allocated `at::Tensor` without another owner, as tch's own constructors
    // do.
    unsafe { Tensor::from_ptr(tensor.cast()) }
}

/// Takes ownership of a tensor; null becomes `None`.
fn owned_or_none(tensor: *mut RawTensor) -> Option<Tensor> {
    (!tensor.is_null()).then(|| owned(tensor))
}
