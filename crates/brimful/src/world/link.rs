//! Lock around this rank's messages, waits of threads for messages, and the pump: a thread that makes progress
//! on messages while the other threads compute.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::error::WorldError;
use super::message::{Channel, Message};
use super::messenger::Messenger;
use super::ring::Ring;
use super::waits::Wait;
use crate::Result;

/// Interval at which the pump makes progress on messages while ranks work together.
const BUSY_INTERVAL: Duration = Duration::from_millis(1);
/// Interval while a device still copies data to host memory from which they are sent.
const DEVICE_INTERVAL: Duration = Duration::from_micros(100);
/// Interval when there are only heartbeats.
const IDLE_INTERVAL: Duration = Duration::from_millis(10);

/// Result of one look at the messages by a waiting thread.
pub(super) enum Look<T> {
    Found(T),
    /// Nothing has been found yet.
    WaitFor(Wait),
}

/// Messages of this rank, shared by its threads.
#[derive(Debug)]
pub(super) struct Link {
    /// `None` after the end of the world.
    engine: Mutex<Option<Messenger>>,
    /// Sums that the next holder of the lock begins. A computing thread must not wait for the lock, which is
    /// held while data are copied.
    sums: Mutex<Vec<(Channel, Ring)>>,
    ends: AtomicBool,
}

impl Link {
    pub(super) fn new(engine: Messenger) -> Arc<Self> {
        Arc::new(Self {
            engine: Mutex::new(Some(engine)),
            sums: Mutex::default(),
            ends: AtomicBool::new(false),
        })
    }

    /// Queues a sum, which the next holder of the lock begins.
    pub(super) fn begin_sum(&self, channel: Channel, ring: Ring) {
        self.sums.lock().unwrap_or_else(PoisonError::into_inner).push((channel, ring));
    }

    fn lock(&self) -> MutexGuard<'_, Option<Messenger>> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `f` on the messages; `f` must not wait.
    pub(super) fn with<T>(&self, f: impl FnOnce(&mut Messenger) -> T) -> Result<T> {
        let mut engine = self.lock();
        let ended = || WorldError::NotStarted { reason: "it has ended".into() };
        let engine = engine.as_mut().ok_or_else(ended)?;
        // The next holder of the lock takes the sums over, and unlocks them before `f`, which may copy for
        // long.
        let mut begun = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        engine.rings.extend(begun.drain(..));
        drop(begun);
        Ok(f(engine))
    }

    /// Makes progress on messages until `look` finds something. Fails if the rank that it waits for is gone.
    pub(super) fn wait<T>(
        &self,
        mut look: impl FnMut(&mut Messenger) -> Result<Look<T>>,
    ) -> Result<T> {
        let mut pause = Pause::default();
        loop {
            // The lock is held for one look only: other threads and the heartbeats need it too.
            let found = self.with(|engine| {
                engine.progress();
                let looked = look(engine);
                if matches!(looked, Ok(Look::Found(_) | Look::WaitFor(Wait::Nobody)) | Err(_)) {
                    engine.waits.over();
                }
                Ok(match looked? {
                    Look::Found(found) => Some(found),
                    Look::WaitFor(wait) => engine.wait_for(wait).map(|()| None)?,
                })
            });
            let found: Result<Option<T>> = found?;
            match found? {
                Some(found) => return Ok(found),
                None => pause.rest(),
            }
        }
    }
}

/// Increasing pauses: other threads may need the core, and most messages arrive soon.
#[derive(Debug, Default)]
struct Pause {
    rests: u32,
}

impl Pause {
    fn rest(&mut self) {
        self.rests += 1;
        match self.rests {
            // An answer of another rank takes some microseconds, less than the shortest sleep.
            ..=100 => thread::yield_now(),
            _ => thread::sleep(
                Duration::from_micros(20).saturating_mul(self.rests - 100).min(BUSY_INTERVAL / 5),
            ),
        }
    }
}

/// Thread that makes progress on messages. It starts and ends the wire, because MPI must be ended by the thread
/// that has started it. Dropping the pump ends this rank's part in the world.
#[derive(Debug)]
pub(super) struct Pump {
    pub(super) link: Arc<Link>,
    thread: Option<JoinHandle<()>>,
    /// Receives one message when the thread no longer waits for other ranks, and another when MPI has ended.
    /// Behind a lock so that threads can share a world.
    done: Mutex<Receiver<()>>,
}

impl Pump {
    /// Starts the thread, which first runs `start`.
    pub(super) fn start(
        start: impl FnOnce() -> Result<Messenger, WorldError> + Send + 'static,
    ) -> Result<Self> {
        let (begun, link) = channel();
        let (ended, done) = channel();
        let run = move || {
            let link = start().map(Link::new);
            // The receiver is gone only if the starting thread has panicked.
            let _ = begun.send(link.clone());
            if let Ok(link) = link {
                pump(&link, &ended);
            }
        };
        let not_started = |reason: String| WorldError::NotStarted { reason };
        let thread = thread::Builder::new().name("brimful world".to_owned()).spawn(run);
        let thread = Some(thread.map_err(|error| not_started(error.to_string()))?);
        let link = link.recv().map_err(|_| not_started("its thread has panicked".into()))??;
        Ok(Self { link, thread, done: Mutex::new(done) })
    }
}

impl Drop for Pump {
    /// Announces the end of this rank, and waits until all ranks end or one is lost.
    fn drop(&mut self) {
        let words = thread::panicking().then(|| "it panicked".to_owned());
        let heartbeat_timeout = self.link.with(|engine| {
            engine.tell_all(&Message::Left { words });
            engine.pulse.heartbeat_timeout
        });
        self.link.ends.store(true, Ordering::Release);
        let Some(thread) = self.thread.take() else { return };
        // The thread may be pausing for 10 ms, while all other ranks wait for this rank's end.
        thread.thread().unpark();
        // The thread itself notices lost ranks; but MPI's own end, which it calls last, has no timeout.
        let done = self.done.get_mut().unwrap_or_else(PoisonError::into_inner);
        if done.recv().is_ok() && done.recv_timeout(heartbeat_timeout.unwrap_or_default()).is_ok() {
            let _ = thread.join();
        }
    }
}

/// Makes progress on messages until the end, then ends MPI in order if no rank is lost.
fn pump(link: &Link, ended: &Sender<()>) {
    loop {
        let Ok((over, rest)) = link.with(|engine| {
            engine.progress();
            engine.watch(Instant::now());
            let over = engine.all_left() || engine.is_broken();
            (over, rest(engine))
        }) else {
            return;
        };
        if over && link.ends.load(Ordering::Acquire) {
            break;
        }
        thread::park_timeout(rest);
    }
    let _ = ended.send(());
    // Taken out of the lock: MPI's end waits for all ranks, and may wait for ever.
    let engine = link.lock().take();
    if let Some(engine) = engine.filter(|engine| !engine.is_broken()) {
        engine.into_wire().end();
    }
    let _ = ended.send(());
}

/// Returns the time until the pump makes progress on messages again.
fn rest(engine: &Messenger) -> Duration {
    match (engine.expects_a_device(), engine.is_busy()) {
        (true, _) => DEVICE_INTERVAL,
        (false, true) => BUSY_INTERVAL,
        (false, false) => IDLE_INTERVAL,
    }
}
