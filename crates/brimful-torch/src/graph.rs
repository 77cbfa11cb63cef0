//! CUDA graphs: work captured once on a stream and replayed with one launch instead of thousands.
//!
//! During a capture, work that a thread puts on its current stream is not run, but recorded with the addresses of
//! its tensors. A replay runs it on the current contents of that memory. Each replay continues the device's random
//! number sequence, as if the work ran eagerly.

use tch::Device;

use crate::device::accelerator;
use crate::error::TorchError;
use crate::ffi::{self, RawGraph};
use crate::stream::{Event, Stream};
use crate::{cuda_object, kernels};

/// Checks that work can be captured here.
///
/// # Errors
/// When there is no CUDA, or the CUDA version lacks a symbol.
pub fn available() -> Result<(), TorchError> {
    cuda_object::load()
        .map_err(|error| TorchError::other(format!("CUDA graphs are not available here: {error}")))
}

/// Private memory pool of captured work. Graphs that never replay at the same time may share a pool: each
/// overwrites the memory of the others.
#[derive(Debug, Default)]
pub struct Pool([u64; 2]);

/// Capture in progress on this thread's current stream; dropping it cancels the capture.
#[derive(Debug)]
#[must_use = "a capture that is dropped is called off"]
pub struct Capture(*mut RawGraph);

/// Captured work, ready to replay.
#[derive(Debug)]
pub struct Graph(Capture);

/// Captures the work that `f` puts on this stream, ordered after the current stream's work so far. The stream
/// must not be the device's default one; `f` must not wait for the device or read from it.
///
/// # Errors
/// The error of `f`, or a failure to capture some operation. The stream stays usable.
pub fn record<T, E: From<TorchError>>(
    stream: Stream,
    pool: &mut Pool,
    f: impl FnOnce() -> Result<T, E>,
) -> Result<(Graph, T), E> {
    let device = stream.device();
    stream.wait(&Event::after(Stream::current(device)?)?)?;
    let _inside = stream.enter()?;
    let capture = Capture::begin(device, pool)?;
    let value = f()?;
    Ok((capture.end(pool)?, value))
}

// SAFETY: a completed graph is a CUDA handle that any thread may use, one at a time; it has one owner.
unsafe impl Send for Graph {}

impl Capture {
    /// Begins a capture on the current stream, which must not be the device's default one. Until the capture ends,
    /// this thread must not wait for the device or read from it.
    ///
    /// # Errors
    /// When capture is not available, or the stream is the default one.
    pub fn begin(device: Device, pool: &Pool) -> Result<Self, TorchError> {
        let index = accelerator(device)?;
        available()?;
        // SAFETY: the pool's id is an array of two numbers, which outlives the call. On success the caller owns
        // the handle.
        unsafe { ffi::brimful_graph_begin(index, pool.0.as_ptr()) }.map(Self)
    }

    /// Ends the capture, on the thread and the stream that began it.
    ///
    /// # Errors
    /// When something could not be captured. The stream stays usable.
    pub fn end(self, pool: &mut Pool) -> Result<Graph, TorchError> {
        // SAFETY: the handle is a capture in progress, which `self` owns. The pool's id has space for two numbers.
        unsafe { ffi::brimful_graph_end(self.0, kernels::enabled(), pool.0.as_mut_ptr()) }?;
        Ok(Graph(self))
    }
}

impl Graph {
    /// Runs the work on this thread's current stream.
    ///
    /// # Errors
    /// When the device has failed.
    pub fn replay(&mut self) -> Result<(), TorchError> {
        // SAFETY: the handle is a captured graph, borrowed mutably.
        unsafe { ffi::brimful_graph_replay(self.0.0) }
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        // SAFETY: the handle is owned and dropped once.
        unsafe { ffi::brimful_graph_drop(self.0) }
    }
}
