//! Output to standard error: the library's log, and the progress of long work. On a terminal, progress is a bar;
//! elsewhere, it is a line every ten seconds.

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use brimful::balance::LayerCost;
use brimful::device;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use tch::Device;
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::{self, format};
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

/// All bars of the process, so that lines can be printed above them. Without a terminal, no bar is drawn.
static SCREEN: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);
/// True if progress is switched off.
static QUIET: AtomicBool = AtomicBool::new(false);
/// Time between two lines of progress if there is no terminal.
const BETWEEN_LINES: Duration = Duration::from_secs(10);
/// Shortest time between two updates of a bar within a step.
const BETWEEN_LOOKS: Duration = Duration::from_millis(200);

/// Switches progress off.
pub(crate) fn be_quiet() {
    QUIET.store(true, Ordering::Relaxed);
}

/// Hides the bars while a function writes to the terminal.
pub(crate) fn aside<T>(write: impl FnOnce() -> T) -> T {
    SCREEN.suspend(write)
}

/// Prints a line to standard error, above the bars.
pub fn say(text: &str) {
    // A single write keeps lines of other processes from mixing in. If the write fails, no output is left to
    // report the error to.
    aside(|| drop(io::stderr().write_all(format!("{text}\n").as_bytes())));
}

/// Prints a line to standard error where no bar can be drawn, unless progress is switched off.
pub fn note(text: &str) {
    if SCREEN.is_hidden() && !QUIET.load(Ordering::Relaxed) {
        say(text);
    }
}

/// Starts the progress of measuring `layers` layers. Returns a function that is called with each measured layer.
pub fn begin_measuring(layers: usize, device: Device) -> impl FnMut(&LayerCost) {
    note(&format!(
        "brimful: measuring time and memory of {layers} layers on {}",
        device::name(device)
    ));
    let progress = Progress::new(layers, "layers");
    move |layer| {
        progress.doing(format!("measured {}", layer.name));
        progress.advance(1);
    }
}

/// Progress of work of known length.
#[derive(Debug)]
pub struct Progress(Ticker);

impl Progress {
    /// Starts and shows the progress of `length` units of work.
    pub fn new(length: usize, unit: &'static str) -> Self {
        let bar = ProgressBar::new(length as u64).with_style(style());
        let quiet = QUIET.load(Ordering::Relaxed);
        let bar = if quiet { ProgressBar::hidden() } else { SCREEN.add(bar) };
        let now = Instant::now();
        let shown = Mutex::new(Shown { doing: String::new(), told: now, said: now });
        let ticker = Ticker { bar, unit, shown: Arc::new(shown) };
        ticker.show();
        if !ticker.bar.is_hidden() {
            // Redraws the bar during a long step, so that it follows a change of the terminal's width.
            ticker.bar.enable_steady_tick(Duration::from_millis(500));
        }
        Self(ticker)
    }

    /// Starts the count at `done` units, which are done already.
    pub(crate) fn starting_at(self, done: usize) -> Self {
        self.0.bar.set_position(done as u64);
        self.0.bar.reset_eta();
        self.0.show();
        self
    }

    /// Returns a handle that counts from any thread.
    pub(crate) fn ticker(&self) -> Ticker {
        self.0.clone()
    }

    /// Shows a description of the current work beside the speed and the time left.
    pub fn doing(&self, what: String) {
        self.0.shown().doing = what;
        self.0.show();
    }

    /// Counts `units` more units.
    pub fn advance(&self, units: usize) {
        self.0.bar.inc(units as u64);
        self.0.tell();
    }

    /// Sets the count to `units`.
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

/// Handle that counts units.
#[derive(Debug, Clone)]
pub(crate) struct Ticker {
    bar: ProgressBar,
    unit: &'static str,
    shown: Arc<Mutex<Shown>>,
}

/// State of the display besides the count.
#[derive(Debug)]
struct Shown {
    /// Description of the current work.
    doing: String,
    /// Time of the last update on the terminal.
    told: Instant,
    /// Time of the last printed line.
    said: Instant,
}

impl Ticker {
    /// Counts `units` more units.
    pub(crate) fn advance(&self, units: usize) {
        self.bar.inc(units as u64);
        // A line that changed at every micro-batch would be unreadable.
        if self.shown().told.elapsed() >= BETWEEN_LOOKS {
            self.tell();
        }
    }

    fn tell(&self) {
        self.shown().told = Instant::now();
        // The first call makes the bar update speed and time left. The second call shows the new values.
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

    /// Formats the count, the speed, the time left and the current work.
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

/// Returns the style: a short bar, and a text that is cut at the terminal's width, because a wrapped line could
/// not be erased.
fn style() -> ProgressStyle {
    ProgressStyle::with_template("{bar:10} {wide_msg}").expect("the template is right")
}

/// Formats a speed; a low speed gets decimals.
fn rate(per_second: f64, unit: &str) -> String {
    let decimals = if per_second < 10.0 { 2 } else { 0 };
    format!("{per_second:.decimals$} {unit}/s")
}

/// Formats a time in seconds, minutes or hours, whichever is precise enough.
fn rounded(time: Duration) -> String {
    match time.as_secs() {
        seconds @ 0..120 => format!("{seconds} s"),
        seconds @ 120..7200 => format!("{} min", seconds.div_ceil(60)),
        seconds => format!("{} h", seconds.div_ceil(3600)),
    }
}

/// Starts to print the library's log above the bars. If `verbose` is true, prints the log unchanged, down to level
/// DEBUG; else prints only warnings, in plain words.
pub(crate) fn print_log(verbose: bool) {
    let level = if verbose { LevelFilter::DEBUG } else { LevelFilter::WARN };
    let ours = Targets::new().with_target("brimful", level);
    let plain = fmt::layer().without_time().with_ansi(false);
    let lines = if verbose {
        plain.with_writer(|| Aside { before: "" }).boxed()
    } else {
        // Fields of a warning are printed in plain words, not as name = value.
        let told = format::debug_fn(|out, field, value| match field.name() {
            "message" => write!(out, "{value:?}"),
            name => write!(out, "{}: {value:?}", name.replace('_', " ")),
        });
        let words = plain.with_level(false).with_target(false).fmt_fields(told.delimited("; "));
        words.with_writer(|| Aside { before: "brimful: warning: " }).boxed()
    };
    tracing_subscriber::registry().with(ours).with(lines).init();
}

/// Writer to standard error that hides the bars while it writes. Each write is a whole log line.
struct Aside {
    /// Prefix of every line.
    before: &'static str,
}

impl Write for Aside {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let whole = [self.before.as_bytes(), line.trim_ascii_start()].concat();
        aside(|| io::stderr().write_all(&whole))?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
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
