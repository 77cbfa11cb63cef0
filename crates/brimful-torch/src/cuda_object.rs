//! Shared object with the functions that need libtorch's CUDA symbols, loaded where CUDA is available.

use std::sync::OnceLock;

use tch::Tensor;

use crate::error::TorchError;
use crate::ffi;

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/brimful_cuda.so"));

/// Loads the object and registers its functions with the bridge. Later calls return the result of the first call.
///
/// # Errors
/// The loader's message, when there is no CUDA or the CUDA version lacks a symbol.
pub(crate) fn load() -> Result<(), TorchError> {
    static LOADED: OnceLock<Result<(), TorchError>> = OnceLock::new();
    let load = || {
        crate::cuda::load()?;
        // SAFETY: `OBJECT` is a static array of this length.
        unsafe { ffi::brimful_load_cuda_object(OBJECT.as_ptr(), OBJECT.len()) }
    };
    LOADED.get_or_init(load).clone()
}

/// Registers the custom kernels before work on a CUDA tensor. If that fails, libtorch's own operations run.
pub(crate) fn load_for(tensor: &Tensor) {
    if tensor.device().is_cuda() {
        let _ = load();
    }
}
