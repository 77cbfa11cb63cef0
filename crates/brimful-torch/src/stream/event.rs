//! Events, which mark a point in a stream's work.

use std::ptr;
use std::time::Duration;

use tch::Device;

use super::{Stream, on_accelerator};
use crate::device::number;
use crate::error::TorchError;
use crate::ffi::{self, RawEvent};

/// Point in a stream's work, to wait for or to measure times from.
#[derive(Debug)]
pub struct Event {
    device: Device,
    pub(super) handle: *mut RawEvent,
}

// SAFETY: an event may be used from any thread, one at a time.
unsafe impl Send for Event {}
// SAFETY: methods on `&self` only read the event, which libtorch and the driver allow from any thread.
unsafe impl Sync for Event {}

impl Event {
    /// Creates an event for streams of this device, not yet recorded.
    ///
    /// # Errors
    /// When the device does not exist.
    pub fn new(device: Device) -> Result<Self, TorchError> {
        let handle = match device {
            Device::Cpu => ptr::null_mut(),
            // SAFETY: takes a plain number.
            _ => unsafe { ffi::brimful_event_new(number(device)?) }?,
        };
        Ok(Self { device, handle })
    }

    /// Creates an event recorded after the stream's work so far.
    ///
    /// # Errors
    /// When the device has failed.
    pub fn after(stream: Stream) -> Result<Self, TorchError> {
        let mut event = Self::new(stream.device)?;
        event.record(stream)?;
        Ok(event)
    }

    /// Records the event after the stream's work so far.
    ///
    /// # Errors
    /// When the stream belongs to another device, or the device has failed.
    pub fn record(&mut self, stream: Stream) -> Result<(), TorchError> {
        if stream.device != self.device {
            let (event, stream) = (self.device, stream.device);
            return Err(TorchError::other(format!(
                "an event of {event:?} cannot be recorded on a stream of {stream:?}"
            )));
        }
        on_accelerator(self.device, |index| {
            // SAFETY: the event lives as long as `self`; the id came from libtorch.
            unsafe { ffi::brimful_event_record(self.handle, index, stream.id) }
        })
    }

    /// Returns whether the work before the event is done, or the event was never recorded.
    ///
    /// # Errors
    /// When the device has failed.
    pub fn is_reached(&self) -> Result<bool, TorchError> {
        if self.handle.is_null() {
            return Ok(true);
        }
        // SAFETY: the event lives as long as `self`.
        unsafe { ffi::brimful_event_query(self.handle) }
    }

    /// Blocks the host until the work before the event is done.
    ///
    /// # Errors
    /// When the device has failed.
    pub fn synchronize(&self) -> Result<(), TorchError> {
        if self.handle.is_null() {
            return Ok(());
        }
        // SAFETY: the event lives as long as `self`.
        unsafe { ffi::brimful_event_synchronize(self.handle) }
    }

    /// Returns the time from this event to a later one; both must have completed.
    ///
    /// # Errors
    /// When one of them was not recorded or has not completed, or they belong to a CPU, which has no queue.
    pub fn elapsed(&self, later: &Event) -> Result<Duration, TorchError> {
        if self.handle.is_null() || later.handle.is_null() {
            return Err(TorchError::other("a CPU's events carry no time"));
        }
        // SAFETY: both events are alive.
        let milliseconds = unsafe { ffi::brimful_event_elapsed(self.handle, later.handle) }?;
        Ok(Duration::from_secs_f64(milliseconds.max(0.0) / 1e3))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: the event is owned and dropped once.
            unsafe { ffi::brimful_event_drop(self.handle) }
        }
    }
}
