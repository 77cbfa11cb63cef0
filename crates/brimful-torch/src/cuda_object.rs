//! What only libtorch's CUDA half can do: compiled into an object of its own, that is loaded where CUDA is.

use std::sync::OnceLock;

use tch::Tensor;

use crate::error::TorchError;
use crate::ffi;

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/brimful_cuda.so"));

/// Makes what it can do known to the bridge. Later calls repeat the first one's answer.
///
/// # Errors
/// With the loader's own words, where there is no CUDA, or one that lacks what is needed.
pub(crate) fn load() -> Result<(), TorchError> {
    static LOADED: OnceLock<Result<(), TorchError>> = OnceLock::new();
    let load = || {
        crate::cuda::load()?;
        // SAFETY: the bytes are valid for their length.
        unsafe { ffi::brimful_load_cuda_object(OBJECT.as_ptr(), OBJECT.len()) }
    };
    LOADED.get_or_init(load).clone()
}

/// Makes kernels of our own known before work on such a tensor. Where they cannot be had, libtorch's own
/// operations run.
pub(crate) fn load_for(tensor: &Tensor) {
    if tensor.device().is_cuda() {
        let _ = load();
    }
}
