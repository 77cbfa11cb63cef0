//! The threads that engines have started.

use std::thread;
use std::time::{Duration, Instant};

/// How long a thread that was joined may still be listed.
const PATIENCE: Duration = Duration::from_secs(10);

/// How many threads of this process belong to engines.
pub fn threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("Linux");
    let names =
        tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|name| name.starts_with("brimful ")).count()
}

/// Waits until there are so many.
#[track_caller]
pub fn assert_threads(expected: usize) {
    let deadline = Instant::now() + PATIENCE;
    while threads() != expected {
        assert!(Instant::now() < deadline, "{} threads, not {expected}", threads());
        thread::sleep(Duration::from_millis(1));
    }
}
