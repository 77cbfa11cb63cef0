//! Exit codes of the program, and requests to end it early.
//!
//! The first Ctrl-C or SIGTERM ends the run after the current step, the second one at once. A closed standard
//! output also ends the run after the current step.

use std::convert::Infallible;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::{fmt, thread};

use anyhow::Result;
use brimful::Error;
use brimful::balance::BalanceError;
use brimful::internal::{self, Caught};
use signal_hook::consts::{SIGINT, SIGPIPE, SIGTERM, SIGXFSZ};
use signal_hook::flag;
use signal_hook::iterator::Signals;

use crate::{output, progress};

/// Section about the exit codes, in `--help` and in the man page.
pub const CODES: &str = "\
Exit codes:
  0    done
  1    failed: a file that cannot be read or written, a run that broke off
  2    wrong use: a flag, a key of the config file or a value that is not valid; data or a folder of a model whose
       content cannot be used
  3    does not fit: memory ran out, or nothing that was planned fits
  4    a check failed: verify found a difference, or doctor a problem
  130  interrupted by Ctrl-C (143 by SIGTERM, 141 by a closed output): after the running step,
       saved with --save";

/// Result of the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// Success.
    Done,
    /// Failure for any reason that has no separate exit code.
    Failed,
    /// Invalid command line or config file.
    WrongUse,
    /// Memory ran out, or would run out.
    DoesNotFit,
    /// A check ran and found a fault.
    Fault,
    /// A signal ended the run.
    Interrupted {
        /// Number of the signal.
        signal: u8,
    },
}

impl Exit {
    /// Returns the exit code for an error.
    pub fn of(error: &anyhow::Error) -> Self {
        error.chain().find_map(Self::of_cause).unwrap_or(Self::Failed)
    }

    fn of_cause(cause: &(dyn std::error::Error + 'static)) -> Option<Self> {
        if let Some(told) = cause.downcast_ref::<ErrorWithExit>() {
            return Some(told.exit);
        }
        if cause.is::<clap::Error>() {
            return Some(Self::WrongUse);
        }
        match cause.downcast_ref::<Error>() {
            Some(Error::NoDevice { .. } | Error::LimitOfZero { .. }) => Some(Self::WrongUse),
            Some(Error::DoesNotFit { .. } | Error::Balance(BalanceError::DoesNotFit { .. })) => {
                Some(Self::DoesNotFit)
            }
            _ => tells_of_memory(cause).then_some(Self::DoesNotFit),
        }
    }

    /// Returns the exit code; for a signal 128 plus its number, as shells do.
    pub const fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Failed => 1,
            Self::WrongUse => 2,
            Self::DoesNotFit => 3,
            Self::Fault => 4,
            Self::Interrupted { signal } => 128 + signal,
        }
    }
}

/// Error that carries its own exit code.
#[derive(Debug)]
struct ErrorWithExit {
    exit: Exit,
    text: String,
}

impl fmt::Display for ErrorWithExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for ErrorWithExit {}

/// Makes an error for a flag, a key or a value that is invalid.
pub fn wrong_use(text: impl Into<String>) -> anyhow::Error {
    ErrorWithExit { exit: Exit::WrongUse, text: text.into() }.into()
}

/// Turns an error in reading data or a model's folder into an error of wrong use. Leaves I/O errors unchanged.
/// Also leaves errors unchanged that have an exit code other than [`Exit::Failed`], such as out of memory.
pub(crate) fn wrong_content(error: anyhow::Error) -> anyhow::Error {
    let is_of_system = error.chain().any(|cause| cause.is::<std::io::Error>());
    match is_of_system || Exit::of(&error) != Exit::Failed {
        true => error,
        false => wrong_use(output::causes(&error)),
    }
}

/// Checks a condition. If it is false, returns from the calling function with an error of wrong use in these
/// words.
macro_rules! ensure_use {
    ($is_right:expr, $($words:tt)+) => {
        if !$is_right {
            return Err($crate::exit::wrong_use(format!($($words)+)));
        }
    };
}
pub(crate) use ensure_use;

/// Fails if one of these flags is given: if its `bool` is true. The error says that the flag is for `purpose`.
pub(crate) fn ensure_unsaid(flags: &[(&str, bool)], purpose: &str) -> anyhow::Result<()> {
    match flags.iter().find(|(_, is_said)| *is_said) {
        Some((flag, _)) => Err(wrong_use(format!("--{flag} is for {purpose}"))),
        None => Ok(()),
    }
}

/// Makes an error for something that is too large for the available memory.
pub fn does_not_fit(text: impl Into<String>) -> anyhow::Error {
    ErrorWithExit { exit: Exit::DoesNotFit, text: text.into() }.into()
}

/// Returns whether an error carries its own exit code, and so has a remedy in its text.
pub(crate) fn has_exit(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| cause.is::<ErrorWithExit>())
}

/// Returns whether memory ran out.
pub fn ran_out(error: &anyhow::Error) -> bool {
    error.chain().any(tells_of_memory)
}

/// Returns whether an error means out of memory. The library's errors carry this information; other errors are
/// recognised by their texts.
fn tells_of_memory(cause: &(dyn std::error::Error + 'static)) -> bool {
    match cause.downcast_ref::<Error>() {
        Some(error) => error.out_of_memory().is_some(),
        None => internal::recognise(&cause.to_string()).is_some(),
    }
}

/// Runs a command. Turns an out-of-memory panic, which tch's infallible calls can raise, into an ordinary error.
pub(crate) fn without_panic(run: impl FnOnce() -> anyhow::Result<Exit>) -> anyhow::Result<Exit> {
    match internal::catch(|| Ok::<_, Infallible>(run())) {
        Ok(outcome) => outcome,
        Err(Caught::OutOfMemory(oom)) => Err(Error::from(oom).into()),
        Err(Caught::Panic(panic)) => resume_unwind(panic),
        Err(Caught::Error(never)) => match never {},
    }
}

/// True once the running command can be asked to end.
static LISTENS: AtomicBool = AtomicBool::new(false);
/// Number of the signal that asked the run to end, or 0.
static SIGNAL: AtomicU8 = AtomicU8::new(0);

/// Listens for signals until the process ends.
pub(crate) fn listen_for_signals() -> Result<()> {
    if LISTENS.load(Ordering::Relaxed) {
        return Ok(());
    }
    let asked = Arc::new(AtomicBool::new(false));
    for known in [SIGINT, SIGTERM] {
        let at_once = Exit::Interrupted { signal: known as u8 }.code();
        flag::register_conditional_shutdown(known, at_once.into(), Arc::clone(&asked))?;
    }
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    thread::Builder::new().name("signals".into()).spawn(move || {
        if let Some(first) = signals.forever().next() {
            SIGNAL.store(first as u8, Ordering::Relaxed);
            asked.store(true, Ordering::Relaxed);
            progress::say("brimful: finishing the step; press again to end at once");
        }
    })?;
    LISTENS.store(true, Ordering::Relaxed);
    Ok(())
}

/// Returns [`Exit::Interrupted`] if a signal or a closed output asked the run to end.
pub(crate) fn asked() -> Option<Exit> {
    match SIGNAL.load(Ordering::Relaxed) {
        0 => None,
        signal => Some(Exit::Interrupted { signal }),
    }
}

/// Asks the run to end because standard output has no reader. Returns false if the running command does not listen
/// for requests; the caller must then end the process.
pub(crate) fn ask_unread() -> bool {
    let listens = LISTENS.load(Ordering::Relaxed);
    if listens {
        // If a signal asked earlier, its exit code stays.
        let _ = SIGNAL.compare_exchange(0, SIGPIPE as u8, Ordering::Relaxed, Ordering::Relaxed);
    }
    listens
}

/// Makes a write beyond the shell's limit on file sizes (`ulimit -f`) fail with an error. Without this call, a
/// signal would kill the process.
pub(crate) fn survive_file_limits() -> Result<()> {
    flag::register(SIGXFSZ, Arc::default())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use anyhow::{Context, anyhow};
    use brimful_models::pretrained::PretrainedError;

    use super::*;

    #[test]
    fn an_error_is_known_under_whatever_is_said_around_it() {
        let zero = || Error::LimitOfZero { memory: "cpu".into() };
        assert_eq!(Exit::of(&anyhow!("a plain one")), Exit::Failed);
        assert_eq!(Exit::of(&wrong_use("--stages 0").context("it is so")), Exit::WrongUse);
        assert_eq!(Exit::of(&does_not_fit("too large")), Exit::DoesNotFit);
        let wrapped = Err::<(), _>(zero()).context("the model cannot be built");
        assert_eq!(Exit::of(&wrapped.expect_err("wrapped")), Exit::WrongUse);
    }

    #[test]
    fn memory_that_runs_out_is_known_whoever_reports_it() {
        const WORDS: &str = "[enforce fail at alloc_cpu.cpp:117] data. DefaultCPUAllocator: can't allocate memory: \
                             you tried to allocate 512 bytes.";
        let torch = || tch::TchError::Torch(WORDS.into());
        let loaded = PretrainedError::Brimful(Error::from(torch()));
        let panicked = without_panic(|| panic!("called `Result::unwrap()`: {:?}", torch()));
        let errors = [torch().into(), loaded.into(), panicked.expect_err("a panic")];
        for error in errors {
            let error: anyhow::Error = error;
            let around = Err::<(), _>(error).context("the model was not loaded");
            let around = around.expect_err("an error");
            assert!(ran_out(&around), "{around:?}");
            assert_eq!(Exit::of(&around), Exit::DoesNotFit, "{around:?}");
        }
        assert!(!ran_out(&anyhow!("a mother without memory")));
    }

    #[test]
    fn every_code_is_documented() {
        let interrupted = Exit::Interrupted { signal: 2 };
        let exits = [Exit::Done, Exit::Failed, Exit::WrongUse, Exit::DoesNotFit, Exit::Fault];
        for exit in exits.into_iter().chain([interrupted]) {
            assert!(CODES.contains(&format!("\n  {:<3}  ", exit.code())), "{exit:?}");
        }
    }
}
