//! Work on a CUDA stream, captured once and replayed: one launch where there were thousands.
//!
//! What a thread puts on its current stream during a capture is not run but remembered, with the
//! addresses of its tensors. A replay runs it on whatever these hold by then. Random numbers go on
//! from where the device's generator stands at each replay, as if the work had been run anew.

use tch::Device;

use crate::device::accelerator;
use crate::error::TorchError;
use crate::ffi::{self, RawGraph};
use crate::stream::{Event, Stream};
use crate::{cuda_object, kernels};

/// Whether work can be captured here.
///
/// # Errors
/// With the cause, where it cannot: no CUDA, or one that lacks what is needed.
pub fn available() -> Result<(), TorchError> {
    cuda_object::load()
        .map_err(|error| TorchError::other(format!("replay is not available here: {error}")))
}

/// Memory that captured work uses, apart from all other. Graphs that are never replayed at the same
/// time may share it: each overwrites what the others have left in it.
#[derive(Debug, Default)]
pub struct Pool([u64; 2]);

/// A capture under way on this thread's current stream; dropped, it is called off.
#[derive(Debug)]
#[must_use = "a capture that is dropped is called off"]
pub struct Capture(*mut RawGraph);

/// Captured work.
#[derive(Debug)]
pub struct Graph(Capture);

/// Captures what `f` puts on this stream, which must not be the device's default one, after what is on
/// the current stream. `f` must not wait for the device, nor read from it.
///
/// # Errors
/// What `f` fails with; or when something could not be captured. The stream can be used again.
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

// SAFETY: a graph that is not being captured is a handle of CUDA's that any thread may use, one at a
// time; nobody else has it.
unsafe impl Send for Graph {}

impl Capture {
    /// Begins on the current stream, which must not be the device's default one. Until the end this
    /// thread must not wait for the device, nor read from it.
    ///
    /// # Errors
    /// Where nothing can be captured, or the stream is the default one.
    pub fn begin(device: Device, pool: &Pool) -> Result<Self, TorchError> {
        let index = accelerator(device)?;
        available()?;
        // SAFETY: the pool is two numbers; on success the handle is ours.
        unsafe { ffi::brimful_graph_begin(index, pool.0.as_ptr()) }.map(Self)
    }

    /// Ends it, on the thread and the stream that began it.
    ///
    /// # Errors
    /// When something could not be captured. The stream can be used again.
    pub fn end(self, pool: &mut Pool) -> Result<Graph, TorchError> {
        // SAFETY: the handle is a capture under way; the pool has room for two numbers.
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
        // SAFETY: the handle is ours and dropped once.
        unsafe { ffi::brimful_graph_drop(self.0) }
    }
}
