//! Workers shared by several holders, such as a pipeline, its optimizer and its averages.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{self, ThreadId};

use super::Workers;
use crate::{Error, Result};

/// Workers that one holder at a time may send work to.
pub(crate) struct SharedWorkers<W> {
    workers: Arc<Mutex<Workers<W>>>,
    threads: Arc<[ThreadId]>,
}

impl<W> fmt::Debug for SharedWorkers<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.workers.fmt(f)
    }
}

impl<W> Clone for SharedWorkers<W> {
    fn clone(&self) -> Self {
        Self { workers: Arc::clone(&self.workers), threads: Arc::clone(&self.threads) }
    }
}

impl<W> SharedWorkers<W> {
    pub(crate) fn new(workers: Workers<W>) -> Self {
        let threads = workers.threads().collect();
        Self { workers: Arc::new(Mutex::new(workers)), threads }
    }

    /// Waits until no other holder uses the workers.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Workers<W>> {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the workers for a holder that closures on the workers may call.
    ///
    /// # Errors
    /// On a thread of these workers while another holder has locked them, because that holder waits for
    /// this thread.
    pub(crate) fn lock_outside_step(&self) -> Result<MutexGuard<'_, Workers<W>>> {
        match self.workers.try_lock() {
            Ok(workers) => Ok(workers),
            Err(TryLockError::Poisoned(workers)) => Ok(workers.into_inner()),
            Err(TryLockError::WouldBlock) if self.threads.contains(&thread::current().id()) => {
                Err(Error::InStep)
            }
            Err(TryLockError::WouldBlock) => Ok(self.lock()),
        }
    }
}
