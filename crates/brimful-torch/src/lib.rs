//! The few libtorch calls that tch lacks, with a safe face. The only C++ and the only unsafe code
//! of brimful are here.
//!
//! | module | what it adds to tch |
//! | --- | --- |
//! | [`activation`] | a bias and an activation in one |
//! | [`arena`] | CPU memory that is counted, and limited |
//! | [`autograd`] | backward from given gradients; gradients put in place by hand |
//! | [`batch_norm`] | BatchNorm with what follows it, in one |
//! | [`cuda`] | CUDA loaded at run time, where it is present |
//! | [`device`] | waiting for a device |
//! | [`foreach`] | one operation on many tensors at once |
//! | [`gradients`] | gradients taken out of their parameters, into sums |
//! | [`graph`] | work on a CUDA stream, captured once and replayed |
//! | [`host`] | large blocks kept by the process that frees them |
//! | [`kernels`] | kernels of our own, and a switch for them |
//! | [`layout`] | numbers in memory with the channels last |
//! | [`leaves`] | leaves that a backward may add to, and others that it would come to |
//! | [`linear_cross_entropy`] | a linear layer and its loss, without whole logits |
//! | [`mapped`] | numbers of a file, straight into a tensor |
//! | [`memory`] | an accelerator's memory figures, its cache, and a limit |
//! | `mpi` | messages between processes, with the feature `mpi` |
//! | [`meta`] | tensors with a shape and no memory |
//! | [`norm`] | LayerNorm and RMSNorm, with an addition before them |
//! | [`optim`] | the fused optimizers |
//! | [`projection`] | a linear layer, and a table's rows, whose gradients go straight into sums |
//! | [`random`] | a generator's state, taken and put back; a generator for one thread alone |
//! | [`rotary`] | rotary positions |
//! | [`slab`] | bytes of the host that a device copies by itself, made once |
//! | [`split_backward`] | a backward in two halves: the inputs' gradients, and later the weights' |
//! | [`stream`], [`transfer`] | streams, events, copies that do not make the host wait |
//! | [`touched`] | which memory a piece of work reads and writes |
//! | [`threads`] | threads an operation, for one thread alone |
//! | [`libtorch`] | which libtorch is running |

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
pub mod gradients;
pub mod graph;
pub mod host;
pub mod kernels;
pub mod layout;
pub mod leaves;
pub mod libtorch;
pub mod linear_cross_entropy;
pub mod mapped;
pub mod memory;
pub mod meta;
#[cfg(feature = "mpi")]
pub mod mpi;
pub mod norm;
pub mod optim;
pub mod projection;
pub mod random;
mod replaced;
pub mod rotary;
pub mod slab;
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

/// Null stands for none.
fn raw_or_null(tensor: Option<&Tensor>) -> *const RawTensor {
    tensor.map_or(std::ptr::null(), raw)
}

/// For calls that change what the tensor refers to, which tch's own do through `&Tensor` as well.
fn raw_mut(tensor: &Tensor) -> *mut RawTensor {
    tensor.as_ptr().cast_mut().cast()
}

fn raw_list<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> Vec<*const RawTensor> {
    tensors.into_iter().map(raw).collect()
}

/// Takes over a tensor that the bridge has made.
fn owned(tensor: *mut RawTensor) -> Tensor {
    // SAFETY: the bridge's constructors give a heap-allocated `at::Tensor` that nobody else owns,
    // which is what tch's own constructors give.
    unsafe { Tensor::from_ptr(tensor.cast()) }
}

/// The same where null stands for none.
fn owned_or_none(tensor: *mut RawTensor) -> Option<Tensor> {
    (!tensor.is_null()).then(|| owned(tensor))
}
