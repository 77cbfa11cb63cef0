//! MPI messages between processes, with buffers that are owned until they have been sent or filled.
//!
//! Only starting and ending MPI block the caller. All calls go through [`Mpi`], which is not shared, so they never
//! run at the same time; programs with several threads put it behind a lock.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::mem::{self, ManuallyDrop};
use std::time::{Duration, Instant};

use mpi::Threading;
use mpi::environment::Universe;
use mpi::ffi;
use mpi::traits::{AsRaw, Communicator};
use tch::{Device, Tensor};
use thiserror::Error;

/// MPI counts in C's `int`, so longer buffers are sent in pieces.
const LONGEST: usize = 1 << 30;

/// Cause of a failed MPI call.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum MpiError {
    /// MPI can be started once in a process.
    #[error("MPI has been started in this process before")]
    Started,
    /// This MPI does not support threads.
    #[error("this MPI does not allow calls from several threads")]
    Threads,
    /// Ranks did not answer.
    #[error("not all ranks have answered within {} s", .0.as_secs())]
    NoAnswer(Duration),
    /// The tensor is not contiguous in host memory.
    #[error("only dense tensors in the host's memory can be sent")]
    NotDense,
    /// Any other error, with MPI's message.
    #[error("{0}")]
    Other(String),
}

/// MPI of this process.
pub struct Mpi {
    /// Finalised by [`Mpi::end`] alone: finalising waits for all ranks, also for those that have died.
    universe: ManuallyDrop<Universe>,
    lines: [ffi::MPI_Comm; 2],
    /// Announced messages on the control line, with their senders.
    arriving: VecDeque<(usize, MpiMessage)>,
}

/// One of two independent channels for messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MpiLine {
    /// Small messages that the receiver does not expect.
    Control,
    /// Buffers whose length the receiver knows.
    Data,
}

/// Buffer to send or to fill.
#[derive(Debug)]
pub enum Buffer {
    /// Raw bytes.
    Bytes(Vec<u8>),
    /// Data of a contiguous host tensor.
    Tensor(Tensor),
}

/// Message in flight, with its buffer.
#[derive(Debug)]
pub struct MpiMessage {
    requests: Vec<ffi::MPI_Request>,
    buffer: Option<Buffer>,
}

// SAFETY: MPI was started with `Threading::Serialized`: any thread may call it, but only one at a time. `Mpi` is
// not `Sync`, so no two threads call it at once. The handles are plain identifiers.
unsafe impl Send for Mpi {}
// SAFETY: as for `Mpi`, which every call on an `MpiMessage` needs.
unsafe impl Send for MpiMessage {}

impl std::fmt::Debug for Mpi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mpi").finish_non_exhaustive()
    }
}

impl Mpi {
    /// Starts MPI. Without a launcher, this process is alone. The thread that starts MPI must also end it.
    ///
    /// # Errors
    /// When it was started before, or other ranks do not answer within `limit`.
    pub fn start(limit: Duration) -> Result<Self, MpiError> {
        let started = mpi::initialize_with_threading(Threading::Serialized);
        let (universe, threading) = started.ok_or(MpiError::Started)?;
        if threading < Threading::Serialized {
            return Err(MpiError::Threads);
        }
        let world = universe.world().as_raw();
        // After an error MPI is not finalised: that would wait for ranks that do not answer.
        let universe = ManuallyDrop::new(universe);
        let lines = [duplicate(world, limit)?, duplicate(world, limit)?];
        Ok(Self { universe, lines, arriving: VecDeque::new() })
    }

    /// Returns this process's rank.
    pub fn rank(&self) -> usize {
        self.universe.world().rank().unsigned_abs() as usize
    }

    /// Returns the number of processes.
    pub fn size(&self) -> usize {
        self.universe.world().size().unsigned_abs() as usize
    }

    /// Returns this machine's name.
    pub fn host(&self) -> String {
        mpi::environment::processor_name().unwrap_or_default()
    }

    /// Starts sending a buffer.
    ///
    /// # Errors
    /// When MPI refuses.
    pub fn send(
        &mut self,
        line: MpiLine,
        buffer: Buffer,
        to: usize,
        tag: i32,
    ) -> Result<MpiMessage, MpiError> {
        self.begin(buffer, |start, length, request| {
            // SAFETY: `start` and `length` are within the buffer. The `MpiMessage` keeps the buffer until the
            // request has completed, or leaks it.
            unsafe {
                let (kind, comm) = (ffi::RSMPI_UINT8_T, self.lines[line as usize]);
                ffi::MPI_Isend(start.cast_const(), length, kind, to as c_int, tag, comm, request)
            }
        })
    }

    /// Starts receiving a message of exactly the buffer's length.
    ///
    /// # Errors
    /// When MPI refuses.
    pub fn receive(
        &mut self,
        line: MpiLine,
        buffer: Buffer,
        from: usize,
        tag: i32,
    ) -> Result<MpiMessage, MpiError> {
        self.begin(buffer, |start, length, request| {
            // SAFETY: `start` and `length` are within the buffer. The `MpiMessage` keeps the buffer until the
            // request has completed, or leaks it.
            unsafe {
                let (kind, comm) = (ffi::RSMPI_UINT8_T, self.lines[line as usize]);
                ffi::MPI_Irecv(start, length, kind, from as c_int, tag, comm, request)
            }
        })
    }

    /// Returns the next complete message on the control line, with its sender. Does not wait for a message that is
    /// still arriving, but returns no later message of the same sender before it.
    ///
    /// # Errors
    /// When MPI refuses.
    pub fn incoming(&mut self) -> Result<Option<(usize, Vec<u8>)>, MpiError> {
        loop {
            if let Some(message) = self.next_whole()? {
                return Ok(Some(message));
            }
            if !self.accept()? {
                return Ok(None);
            }
        }
    }

    /// Returns the first complete message that has no incomplete one of the same sender before it.
    fn next_whole(&mut self) -> Result<Option<(usize, Vec<u8>)>, MpiError> {
        let mut late: Vec<usize> = Vec::new();
        for (place, (from, message)) in self.arriving.iter_mut().enumerate() {
            if late.contains(from) {
                continue;
            }
            if !message.test()? {
                late.push(*from);
                continue;
            }
            let message = self.arriving.remove(place);
            return Ok(message.and_then(|(from, message)| Some((from, message.into_bytes()?))));
        }
        Ok(None)
    }

    /// Starts receiving the next announced message on the control line, if there is one.
    fn accept(&mut self) -> Result<bool, MpiError> {
        let (mut found, mut length) = (0, 0);
        let comm = self.lines[MpiLine::Control as usize];
        // SAFETY: reads a constant of MPI. A status consists of numbers, which may be zero.
        let (mut message, mut status): (_, ffi::MPI_Status) =
            unsafe { (ffi::RSMPI_MESSAGE_NULL, mem::zeroed()) };
        // SAFETY: MPI writes to these local variables only during the calls.
        unsafe {
            let (any, tag) = (ffi::RSMPI_ANY_SOURCE, ffi::RSMPI_ANY_TAG);
            checked(ffi::MPI_Improbe(any, tag, comm, &mut found, &mut message, &mut status))?;
            if found == 0 {
                return Ok(false);
            }
            checked(ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut length))?;
        }
        // The message is received in one piece, as it was sent.
        let buffer = Buffer::Bytes(vec![0; length.unsigned_abs() as usize]);
        // SAFETY: the buffer has as many bytes as the message. The `MpiMessage` keeps the buffer until the request
        // has completed, or leaks it. `message` is used only during the call.
        let pending = self.begin(buffer, |start, length, request| unsafe {
            ffi::MPI_Imrecv(start, length, ffi::RSMPI_UINT8_T, &mut message, request)
        })?;
        self.arriving.push_back((status.MPI_SOURCE.unsigned_abs() as usize, pending));
        Ok(true)
    }

    /// Returns whether a received message has arrived, or whether a sent one's buffer is free again.
    ///
    /// # Errors
    /// When the message was lost.
    pub fn is_done(&mut self, pending: &mut MpiMessage) -> Result<bool, MpiError> {
        pending.test()
    }

    /// Finalises MPI, for which all ranks wait for each other. Call it on the thread that started MPI.
    pub fn end(self) {
        drop(ManuallyDrop::into_inner(self.universe));
    }

    fn begin(
        &self,
        buffer: Buffer,
        mut start: impl FnMut(*mut c_void, c_int, *mut ffi::MPI_Request) -> c_int,
    ) -> Result<MpiMessage, MpiError> {
        let mut pending = MpiMessage { requests: Vec::with_capacity(1), buffer: Some(buffer) };
        let (first, length) = pending.bytes()?;
        for at in (0..length.max(1)).step_by(LONGEST) {
            // SAFETY: reads a constant of MPI, and `at` is inside the buffer.
            let (mut request, place) = unsafe { (ffi::RSMPI_REQUEST_NULL, first.add(at)) };
            let piece = LONGEST.min(length - at) as c_int;
            checked(start(place.cast(), piece, &mut request))?;
            pending.requests.insert(0, request);
        }
        Ok(pending)
    }
}

impl MpiMessage {
    /// Returns the bytes of a completed message.
    fn into_bytes(mut self) -> Option<Vec<u8>> {
        match self.requests.is_empty().then(|| self.buffer.take())? {
            Some(Buffer::Bytes(bytes)) => Some(bytes),
            _ => None,
        }
    }

    /// Returns whether the whole message is done. Only the owner of the [`Mpi`] may call it.
    fn test(&mut self) -> Result<bool, MpiError> {
        while let Some(request) = self.requests.last_mut() {
            let mut done = 0;
            // SAFETY: `request` was started by this process and has not completed. MPI writes to `done` only
            // during the call.
            checked(unsafe { ffi::MPI_Test(request, &mut done, ffi::RSMPI_STATUS_IGNORE) })?;
            if done == 0 {
                return Ok(false);
            }
            self.requests.pop();
        }
        Ok(true)
    }

    fn bytes(&mut self) -> Result<(*mut u8, usize), MpiError> {
        match &mut self.buffer {
            Some(Buffer::Bytes(bytes)) => Ok((bytes.as_mut_ptr(), bytes.len())),
            Some(Buffer::Tensor(tensor)) => {
                let dense =
                    tensor.device() == Device::Cpu && !tensor.is_sparse() && tensor.is_contiguous();
                let length = tensor.numel() * tensor.kind().elt_size_in_bytes();
                if dense { Ok((tensor.data_ptr().cast(), length)) } else { Err(MpiError::NotDense) }
            }
            None => Ok((std::ptr::null_mut(), 0)),
        }
    }
}

impl Drop for MpiMessage {
    fn drop(&mut self) {
        if !self.requests.is_empty() {
            // MPI may still access the buffer: leaking it is better than corrupting memory.
            mem::forget(self.buffer.take());
        }
    }
}

/// Creates a communicator that returns errors instead of ending the process.
fn duplicate(world: ffi::MPI_Comm, limit: Duration) -> Result<ffi::MPI_Comm, MpiError> {
    let start = Instant::now();
    // SAFETY: `request` and `done` are used only during the calls. MPI may write to `new` until the request
    // completes, even after an early return, so `new` is leaked until then.
    unsafe {
        let new = Box::leak(Box::new(ffi::RSMPI_COMM_NULL));
        let (mut request, mut done) = (ffi::RSMPI_REQUEST_NULL, 0);
        checked(ffi::MPI_Comm_idup(world, new, &mut request))?;
        while done == 0 {
            checked(ffi::MPI_Test(&mut request, &mut done, ffi::RSMPI_STATUS_IGNORE))?;
            if start.elapsed() > limit {
                return Err(MpiError::NoAnswer(limit));
            }
        }
        checked(ffi::MPI_Comm_set_errhandler(*new, ffi::RSMPI_ERRORS_RETURN))?;
        Ok(*new)
    }
}

fn checked(code: c_int) -> Result<(), MpiError> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = vec![0_u8; ffi::MPI_MAX_ERROR_STRING as usize];
    let mut length = 0;
    // SAFETY: the text has the length that MPI requires.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut length) };
    text.truncate(length.unsigned_abs() as usize);
    Err(MpiError::Other(String::from_utf8_lossy(&text).into_owned()))
}
