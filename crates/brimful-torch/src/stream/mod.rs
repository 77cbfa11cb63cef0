//! Streams (queues of work on an accelerator) and events that order them. On a CPU all of this does nothing: work
//! is done when its call returns.

mod event;

use tch::{Device, Tensor};

use crate::device::number;
use crate::error::TorchError;
use crate::replaced::{GuardNumber, Replaced};
use crate::{ffi, raw};

pub use event::Event;

thread_local! {
    static FOUND: Replaced<Stream> = const { Replaced::new() };
}

/// Queue of work on a device, in order within itself and concurrent with other streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    device: Device,
    id: i64,
}

impl Stream {
    /// Returns a stream from libtorch's pool, never the default one.
    ///
    /// # Errors
    /// When the device does not exist.
    pub fn new(device: Device) -> Result<Self, TorchError> {
        Self::ask(device, ffi::brimful_stream_from_pool)
    }

    /// Returns a stream from libtorch's high-priority pool, which [`Stream::new`] never uses. It is for captures:
    /// no other thread's work may enter a stream that is being captured.
    ///
    /// # Errors
    /// When the device does not exist.
    pub fn urgent(device: Device) -> Result<Self, TorchError> {
        Self::ask(device, ffi::brimful_stream_urgent)
    }

    /// Returns the stream on which this thread computes weight gradients while a backward is captured.
    ///
    /// # Errors
    /// When the device does not exist.
    pub fn beside(device: Device) -> Result<Self, TorchError> {
        Self::ask(device, ffi::brimful_stream_beside)
    }

    /// Returns this thread's current stream on the device.
    ///
    /// # Errors
    /// When the device does not exist.
    pub fn current(device: Device) -> Result<Self, TorchError> {
        Self::ask(device, ffi::brimful_stream_current)
    }

    /// Returns the device's default stream, which every thread uses unless it has entered another.
    ///
    /// # Errors
    /// When the device does not exist.
    pub fn common(device: Device) -> Result<Self, TorchError> {
        Self::ask(device, ffi::brimful_stream_common)
    }

    fn ask(
        device: Device,
        f: unsafe fn(i32) -> Result<i64, TorchError>,
    ) -> Result<Self, TorchError> {
        // SAFETY: takes a plain number.
        let id = on_accelerator(device, |index| unsafe { f(index) })?;
        Ok(Self { device, id })
    }

    /// Returns the device that the stream belongs to.
    pub fn device(self) -> Device {
        self.device
    }

    /// Makes this stream the thread's current one until the guard is dropped.
    ///
    /// # Errors
    /// When the device has failed.
    pub fn enter(self) -> Result<StreamGuard, TorchError> {
        let last = Self { id: self.exchange()?, ..self };
        Ok(StreamGuard(Replaced::note(&FOUND, last)))
    }

    fn exchange(self) -> Result<i64, TorchError> {
        // SAFETY: the id came from libtorch.
        on_accelerator(self.device, |index| unsafe { ffi::brimful_stream_enter(index, self.id) })
    }

    /// Blocks the host until the stream has done all its work.
    ///
    /// # Errors
    /// When the device has failed.
    pub fn synchronize(self) -> Result<(), TorchError> {
        on_accelerator(self.device, |index| {
            // SAFETY: the id came from libtorch.
            unsafe { ffi::brimful_stream_synchronize(index, self.id) }
        })
    }

    /// Makes this stream wait for the event; the host does not wait.
    ///
    /// # Errors
    /// When the device has failed.
    pub fn wait(self, event: &Event) -> Result<(), TorchError> {
        // An event of a CPU is always reached, and has no handle.
        if event.handle.is_null() {
            return Ok(());
        }
        on_accelerator(self.device, |index| {
            // SAFETY: the event lives as long as its handle; the id came from libtorch.
            unsafe { ffi::brimful_event_block(event.handle, index, self.id) }
        })
    }

    /// Prevents reuse of the tensor's memory before this stream's work so far is done (`record_stream`).
    ///
    /// # Errors
    /// When the tensor is on another device.
    pub fn record_stream(self, tensor: &Tensor) -> Result<(), TorchError> {
        on_accelerator(self.device, |index| {
            // SAFETY: the tensor is valid; the id came from libtorch.
            unsafe { ffi::brimful_record_stream(raw(tensor), index, self.id) }
        })
    }
}

/// Calls `f` with the device's number; does nothing on a CPU.
fn on_accelerator<T: Default>(
    device: Device,
    f: impl FnOnce(i32) -> Result<T, TorchError>,
) -> Result<T, TorchError> {
    if device == Device::Cpu { Ok(T::default()) } else { f(number(device)?) }
}

/// Keeps a stream current on this thread. Dropping the guard restores the previous stream. Guards may be dropped
/// in any order: the innermost guard that is left stays in effect.
#[derive(Debug)]
#[must_use = "the stream is left when the guard is dropped"]
pub struct StreamGuard(GuardNumber);

impl Drop for StreamGuard {
    fn drop(&mut self) {
        let same_device = |a: &Stream, b: &Stream| a.device == b.device;
        if let Some(last) = Replaced::leave(&FOUND, self.0, same_device) {
            // Fails only if the device has failed, which the next call on it reports.
            let _ = last.exchange();
        }
    }
}
