//! Queues of work on an accelerator, and events that order them. On a CPU all of it is empty:
//! work is done when its call returns.

use std::marker::PhantomData;
use std::ptr;
use std::time::Duration;

use tch::{Device, Tensor};

use crate::device::number;
use crate::error::{TorchError, call};
use crate::ffi::{self, RawEvent};
use crate::raw;
use crate::replaced::{Place, Replaced};

thread_local! {
    static FOUND: Replaced<Stream> = const { Replaced::new() };
}

/// A queue of work on a device: in order within itself, at the same time as other streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    device: Device,
    id: i64,
}

impl Stream {
    /// Another stream than the default one, from libtorch's pool.
    ///
    /// # Errors
    /// When the device does not exist.
    pub fn new(device: Device) -> Result<Self, TorchError> {
        Self::ask(device, ffi::brimful_stream_from_pool)
    }

    /// A stream from another pool, which no [`Stream::new`] ever gives again: for a capture, into
    /// which no other thread must put its work.
    ///
    /// # Errors
    /// When the device does not exist.
    pub fn urgent(device: Device) -> Result<Self, TorchError> {
        Self::ask(device, ffi::brimful_stream_urgent)
    }

    /// The stream that this thread's work on the device goes to.
    ///
    /// # Errors
    /// When the device does not exist.
    pub fn current(device: Device) -> Result<Self, TorchError> {
        Self::ask(device, ffi::brimful_stream_current)
    }

    /// The stream that every thread's work on the device goes to unless it has entered another.
    ///
    /// # Errors
    /// When the device does not exist.
    pub fn common(device: Device) -> Result<Self, TorchError> {
        Self::ask(device, ffi::brimful_stream_common)
    }

    fn ask(
        device: Device,
        f: unsafe extern "C" fn(i32, *mut i64, *mut *mut std::ffi::c_char) -> i32,
    ) -> Result<Self, TorchError> {
        let mut id = 0;
        if device != Device::Cpu {
            let index = number(device)?;
            // SAFETY: `id` is a valid place for the answer.
            call(|message| unsafe { f(index, &mut id, message) })?;
        }
        Ok(Self { device, id })
    }

    /// The device that the stream belongs to.
    pub fn device(self) -> Device {
        self.device
    }

    /// Sends this thread's work on the device to this stream until the guard is dropped.
    ///
    /// # Errors
    /// When the device has failed.
    pub fn enter(self) -> Result<StreamGuard, TorchError> {
        let last = Self { device: self.device, id: self.exchange()? };
        Ok(StreamGuard { place: Replaced::note(&FOUND, last), _this_thread: PhantomData })
    }

    fn exchange(self) -> Result<i64, TorchError> {
        let mut last = 0;
        if self.device != Device::Cpu {
            let index = number(self.device)?;
            // SAFETY: `last` is a valid place for the answer; the id came from libtorch.
            call(|message| unsafe {
                ffi::brimful_stream_enter(index, self.id, &mut last, message)
            })?;
        }
        Ok(last)
    }

    /// Waits until the stream has done all its work.
    ///
    /// # Errors
    /// When the device has failed.
    pub fn synchronize(self) -> Result<(), TorchError> {
        self.on_accelerator(|index| {
            // SAFETY: the id came from libtorch.
            call(|message| unsafe { ffi::brimful_stream_synchronize(index, self.id, message) })
        })
    }

    /// Lets this stream wait for the event; the host goes on.
    ///
    /// # Errors
    /// When the device has failed.
    pub fn wait(self, event: &Event) -> Result<(), TorchError> {
        self.on_accelerator(|index| {
            // SAFETY: the event lives as long as its handle; the id came from libtorch.
            call(|message| unsafe {
                ffi::brimful_event_block(event.handle, index, self.id, message)
            })
        })
    }

    /// Keeps the tensor's memory from being reused before this stream's work so far is done.
    ///
    /// # Errors
    /// When the tensor is of another device.
    pub fn keep(self, tensor: &Tensor) -> Result<(), TorchError> {
        self.on_accelerator(|index| {
            // SAFETY: the tensor is valid; the id came from libtorch.
            call(|message| unsafe {
                ffi::brimful_record_stream(raw(tensor), index, self.id, message)
            })
        })
    }

    fn on_accelerator(
        self,
        f: impl FnOnce(i32) -> Result<(), TorchError>,
    ) -> Result<(), TorchError> {
        if self.device == Device::Cpu { Ok(()) } else { f(number(self.device)?) }
    }
}

/// Keeps a stream current on this thread; dropped, the one before is current again. Guards may be
/// dropped in any order: the innermost that is left holds.
#[derive(Debug)]
#[must_use = "the stream is left when the guard is dropped"]
pub struct StreamGuard {
    place: Place,
    _this_thread: PhantomData<*const ()>,
}

impl Drop for StreamGuard {
    fn drop(&mut self) {
        let same_device = |a: &Stream, b: &Stream| a.device == b.device;
        if let Some(last) = Replaced::leave(&FOUND, self.place, same_device) {
            // Fails only where the device has failed, which the next call on it reports.
            let _ = last.exchange();
        }
    }
}

/// A mark in a stream, to wait for or to measure time between.
#[derive(Debug)]
pub struct Event {
    device: Device,
    handle: *mut RawEvent,
}

// SAFETY: an event may be used from any thread, one at a time.
unsafe impl Send for Event {}

impl Event {
    /// An event for streams of this device, not yet recorded.
    ///
    /// # Errors
    /// When the device does not exist.
    pub fn new(device: Device) -> Result<Self, TorchError> {
        let mut handle = ptr::null_mut();
        if device != Device::Cpu {
            let index = number(device)?;
            // SAFETY: on success `handle` is a new event that is ours.
            call(|message| unsafe { ffi::brimful_event_new(index, &mut handle, message) })?;
        }
        Ok(Self { device, handle })
    }

    /// A mark at the end of the stream's work so far.
    ///
    /// # Errors
    /// When the device has failed.
    pub fn after(stream: Stream) -> Result<Self, TorchError> {
        let mut event = Self::new(stream.device)?;
        event.record(stream)?;
        Ok(event)
    }

    /// Marks the end of the stream's work so far.
    ///
    /// # Errors
    /// When the stream is of another device, or the device has failed.
    pub fn record(&mut self, stream: Stream) -> Result<(), TorchError> {
        if stream.device != self.device {
            let (event, stream) = (self.device, stream.device);
            return Err(TorchError::other(format!(
                "an event of {event:?} on a stream of {stream:?}"
            )));
        }
        stream.on_accelerator(|index| {
            // SAFETY: the event lives as long as `self`; the id came from libtorch.
            call(|message| unsafe {
                ffi::brimful_event_record(self.handle, index, stream.id, message)
            })
        })
    }

    /// Whether the mark is reached, or was never made.
    ///
    /// # Errors
    /// When the device has failed.
    pub fn is_reached(&self) -> Result<bool, TorchError> {
        let mut reached = true;
        if !self.handle.is_null() {
            // SAFETY: the event lives as long as `self`; `reached` is a valid place for the answer.
            call(|message| unsafe {
                ffi::brimful_event_query(self.handle, &mut reached, message)
            })?;
        }
        Ok(reached)
    }

    /// Waits, on the host, until the mark is reached.
    ///
    /// # Errors
    /// When the device has failed.
    pub fn synchronize(&self) -> Result<(), TorchError> {
        if self.handle.is_null() {
            return Ok(());
        }
        // SAFETY: the event lives as long as `self`.
        call(|message| unsafe { ffi::brimful_event_synchronize(self.handle, message) })
    }

    /// The time from this mark to a later one; both must have been reached.
    ///
    /// # Errors
    /// When one of them was not recorded or not reached, or they are of a CPU, which has no queue.
    pub fn elapsed(&self, later: &Event) -> Result<Duration, TorchError> {
        if self.handle.is_null() || later.handle.is_null() {
            return Err(TorchError::other("a CPU's events carry no time"));
        }
        let mut milliseconds = 0.0;
        // SAFETY: both events live; `milliseconds` is a valid place for the answer.
        call(|message| unsafe {
            ffi::brimful_event_elapsed(self.handle, later.handle, &mut milliseconds, message)
        })?;
        Ok(Duration::from_secs_f64(milliseconds.max(0.0) / 1e3))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: the event is ours and dropped once.
            unsafe { ffi::brimful_event_drop(self.handle) }
        }
    }
}
