//! Shared by the benchmarks here: a word of the command line, and the median of several runs.

#![allow(dead_code, reason = "not every benchmark uses all of it")]

use std::hint::black_box;
use std::time::{Duration, Instant};

/// Some work is run as often as this takes, and at least so many times.
const LONG_ENOUGH: Duration = Duration::from_secs(2);
const RUNS: usize = 10;

/// The first word after `--`. Cargo adds a `--bench` of its own.
pub fn argument() -> Option<String> {
    std::env::args().skip(1).find(|word| !word.starts_with("--"))
}

/// Names of the columns of [`report`].
pub fn heading() {
    println!("{:<46}{:>12}{:>12}", "", "median", "least");
}

/// Prints how long some work takes, over the number of its parts: the median and the least of its runs after
/// the first. Where a word is given, that is done of work alone whose name has it.
pub fn report<T>(name: &str, parts: u32, mut work: impl FnMut() -> T) {
    if argument().is_some_and(|wanted| !name.contains(&wanted)) {
        return;
    }
    black_box(work());
    let (begin, mut times) = (Instant::now(), Vec::new());
    while times.len() < RUNS || begin.elapsed() < LONG_ENOUGH {
        let start = Instant::now();
        black_box(work());
        times.push(start.elapsed() / parts);
    }
    times.sort();
    println!("{name:<46}{:>12.2?}{:>12.2?}", median(&times), times[0]);
}

/// The one in the middle of some that are sorted.
pub fn median<T: Copy>(sorted: &[T]) -> T {
    sorted[sorted.len() / 2]
}
