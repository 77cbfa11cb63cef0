//! Threads of engines, and a watchdog that ends a hanging call.

use std::io::{Write, stderr};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Longest time that a joined thread may still be listed.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(10);
/// At least ten times as long as any watched call.
const LIMIT: Duration = Duration::from_secs(30);

/// Returns the number of this process's threads that belong to engines.
pub fn threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("Linux");
    let names =
        tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|name| name.starts_with("brimful ")).count()
}

/// Waits until there are this many threads.
#[track_caller]
pub fn assert_threads(expected: usize) {
    let deadline = Instant::now() + HEARTBEAT_TIMEOUT;
    while threads() != expected {
        assert!(Instant::now() < deadline, "{} threads, not {expected}", threads());
        thread::sleep(Duration::from_millis(1));
    }
}

/// Ends the process with a message unless it is dropped in time.
pub struct Watchdog(Option<(Sender<()>, thread::JoinHandle<()>)>);

impl Watchdog {
    pub fn new(what: String) -> Self {
        let (dropped, waiting) = channel::<()>();
        let thread = thread::spawn(move || {
            if waiting.recv_timeout(LIMIT) == Err(RecvTimeoutError::Timeout) {
                // Not by `eprintln`, whose output tests capture until they end.
                let _said = writeln!(stderr(), "{what}: nobody came to an end within {LIMIT:?}");
                std::process::abort();
            }
        });
        Self(Some((dropped, thread)))
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        let (dropped, thread) = self.0.take().expect("dropped once");
        drop(dropped);
        thread.join().expect("it only waits");
    }
}
