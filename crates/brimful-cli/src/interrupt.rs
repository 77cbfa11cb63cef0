//! Ctrl-C and SIGTERM: the first one ends the run after the current step, the second at once. A closed output ends it
//! after the current step too.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::thread;

use anyhow::Result;
use signal_hook::consts::{SIGINT, SIGPIPE, SIGTERM, SIGXFSZ};
use signal_hook::flag;
use signal_hook::iterator::Signals;

use crate::exit::Exit;
use crate::progress;

/// True once the running command can be asked to end.
static LISTENS: AtomicBool = AtomicBool::new(false);
/// Signal that asked for the end, or 0.
static SIGNAL: AtomicU8 = AtomicU8::new(0);

/// Listens for signals until the process ends.
pub(crate) fn listen() -> Result<()> {
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

/// Returns the exit code if a signal asked for the end.
pub(crate) fn asked() -> Option<Exit> {
    match SIGNAL.load(Ordering::Relaxed) {
        0 => None,
        signal => Some(Exit::Interrupted { signal }),
    }
}

/// Asks for the end because the output has no reader. Returns whether the running command then ends in order, with
/// its progress saved.
pub(crate) fn ask_unread() -> bool {
    let listens = LISTENS.load(Ordering::Relaxed);
    if listens {
        // Keeps the first request.
        let _ = SIGNAL.compare_exchange(0, SIGPIPE as u8, Ordering::Relaxed, Ordering::Relaxed);
    }
    listens
}

/// Turns a file that outgrows the shell's limit (`ulimit -f`) into an error of the write, instead of a signal that
/// kills the process.
pub(crate) fn survive_file_limits() -> Result<()> {
    flag::register(SIGXFSZ, Arc::default())?;
    Ok(())
}
