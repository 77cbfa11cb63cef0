//! How far a long work has come, on standard error: a bar on a terminal, elsewhere a line now and
//! then.

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

/// All bars of the process, so that lines can be written between them. Without a terminal none of
/// them is drawn.
static SCREEN: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);
/// Whether progress is nobody's wish.
static QUIET: AtomicBool = AtomicBool::new(false);
/// How often a line is written where there is no terminal.
const BETWEEN_LINES: Duration = Duration::from_secs(10);
/// How often a terminal is told of what is done within a step.
const BETWEEN_LOOKS: Duration = Duration::from_millis(200);

/// Keeps progress to itself from now on.
pub(crate) fn be_quiet() {
    QUIET.store(true, Ordering::Relaxed);
}

/// Runs what writes to the terminal while no bar is in its way.
pub(crate) fn aside<T>(write: impl FnOnce() -> T) -> T {
    SCREEN.suspend(write)
}

/// Writes a line to standard error, above the bars.
pub fn say(text: &str) {
    // In one piece, between those of other processes; nothing is left to do where even this cannot be written.
    aside(|| drop(io::stderr().write_all(format!("{text}\n").as_bytes())));
}

/// Writes a line to standard error where no bar can say the same.
pub fn note(text: &str) {
    if SCREEN.is_hidden() && !QUIET.load(Ordering::Relaxed) {
        say(text);
    }
}

/// A work of known length.
#[derive(Debug)]
pub struct Progress(Ticker);

impl Progress {
    /// A work of so many units, shown from the start.
    pub fn new(length: usize, unit: &'static str) -> Self {
        let bar = ProgressBar::new(length as u64).with_style(style());
        let quiet = QUIET.load(Ordering::Relaxed);
        let bar = if quiet { ProgressBar::hidden() } else { SCREEN.add(bar) };
        let now = Instant::now();
        let shown = Mutex::new(Shown { doing: String::new(), told: now, said: now });
        let ticker = Ticker { bar, unit, shown: Arc::new(shown) };
        ticker.show();
        if !ticker.bar.is_hidden() {
            // A terminal that changes its width is followed within a long step too.
            ticker.bar.enable_steady_tick(Duration::from_millis(500));
        }
        Self(ticker)
    }

    /// The same from here on, where part of it was done before.
    pub(crate) fn starting_at(self, done: usize) -> Self {
        self.0.bar.set_position(done as u64);
        self.0.bar.reset_eta();
        self.0.show();
        self
    }

    /// What counts on from elsewhere, on any thread.
    pub(crate) fn ticker(&self) -> Ticker {
        self.0.clone()
    }

    /// Says what is being done, or what there is to know besides rate and time.
    pub fn doing(&self, what: String) {
        self.0.shown().doing = what;
        self.0.show();
    }

    /// So many units more are done.
    pub fn advance(&self, units: usize) {
        self.0.bar.inc(units as u64);
        self.0.tell();
    }

    /// So many units are done, whatever was counted on the way.
    pub(crate) fn reach(&self, units: usize) {
        self.0.bar.set_position(units as u64);
        self.0.tell();
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.bar.finish_and_clear();
        SCREEN.remove(&self.0.bar);
    }
}

/// Counts what is done of a work.
#[derive(Debug, Clone)]
pub(crate) struct Ticker {
    bar: ProgressBar,
    unit: &'static str,
    shown: Arc<Mutex<Shown>>,
}

/// What is known besides the count.
#[derive(Debug)]
struct Shown {
    /// What is being done.
    doing: String,
    /// When it was put on the terminal last.
    told: Instant,
    /// When a line was written last.
    said: Instant,
}

impl Ticker {
    /// So many units more are done.
    pub(crate) fn advance(&self, units: usize) {
        self.bar.inc(units as u64);
        // This runs at every micro-batch: nobody can read a line that changes more often.
        if self.shown().told.elapsed() >= BETWEEN_LOOKS {
            self.tell();
        }
    }

    fn tell(&self) {
        self.shown().told = Instant::now();
        // Rate and time left move on with the first, and are told by the second.
        self.show();
        self.show();
        let is_due = self.shown().said.elapsed() >= BETWEEN_LINES;
        if is_due {
            self.shown().said = Instant::now();
            note(&self.line(" of "));
        }
    }

    fn shown(&self) -> MutexGuard<'_, Shown> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn show(&self) {
        self.bar.set_message(self.line("/"));
    }

    /// Count, rate, time left, and what is being done.
    fn line(&self, of: &str) -> String {
        let Self { bar, unit, .. } = self;
        format!(
            "{}{of}{} {unit}  {}  {} left  {}",
            bar.position(),
            bar.length().unwrap_or_default(),
            rate(bar.per_sec(), unit),
            rounded(bar.eta()),
            self.shown().doing
        )
    }
}

/// A short bar and the line beside it, which ends where the terminal does: one that wraps could not be
/// taken away again.
fn style() -> ProgressStyle {
    ProgressStyle::with_template("{bar:10} {wide_msg}").expect("the template is right")
}

/// A slow rate with digits behind the point.
fn rate(per_second: f64, unit: &str) -> String {
    let decimals = if per_second < 10.0 { 2 } else { 0 };
    format!("{per_second:.decimals$} {unit}/s")
}

/// Seconds, minutes or hours: the largest that says enough.
fn rounded(time: Duration) -> String {
    match time.as_secs() {
        seconds @ 0..120 => format!("{seconds} s"),
        seconds @ 120..7200 => format!("{} min", seconds.div_ceil(60)),
        seconds => format!("{} h", seconds.div_ceil(3600)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_rounded_up_to_the_unit_that_people_think_in() {
        let shown = [0, 119, 121, 7199, 7201].map(|s| rounded(Duration::from_secs(s)));
        assert_eq!(shown, ["0 s", "119 s", "3 min", "120 min", "3 h"]);
    }

    #[test]
    fn a_line_says_count_rate_and_rest() {
        let progress = Progress::new(8, "samples");
        progress.doing("loss 0.1".into());
        progress.advance(4);
        let line = progress.0.line(" of ");
        assert!(line.starts_with("4 of 8 samples  "), "{line}");
        assert!(line.ends_with(" left  loss 0.1"), "{line}");
        assert_eq!(
            (rate(2.5, "layers"), rate(1234.5, "samples")),
            ("2.50 layers/s".into(), "1234 samples/s".into())
        );
    }
}
