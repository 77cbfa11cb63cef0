//! Ctrl-C and SIGTERM: the first asks for an end after the running step, the second ends at once. Output that
//! nobody reads any more asks for it too.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::thread;

use anyhow::Result;
use signal_hook::consts::{SIGINT, SIGPIPE, SIGTERM, SIGXFSZ};
use signal_hook::flag;
use signal_hook::iterator::Signals;

use crate::exit::Exit;
use crate::progress;

/// Whether the running command can be asked.
static LISTENS: AtomicBool = AtomicBool::new(false);
/// The signal that has asked for the end, or 0.
static SIGNAL: AtomicU8 = AtomicU8::new(0);

/// Listens from now on, until the process ends.
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
            progress::say("brimful: finishing the step; once more ends at once");
        }
    })?;
    LISTENS.store(true, Ordering::Relaxed);
    Ok(())
}

/// How the program is to end, where somebody has asked.
pub(crate) fn asked() -> Option<Exit> {
    match SIGNAL.load(Ordering::Relaxed) {
        0 => None,
        signal => Some(Exit::Interrupted { signal }),
    }
}

/// Asks for the end because nobody reads the output any more. Gives whether the running command ends in order,
/// with what it has done so far saved.
pub(crate) fn ask_unread() -> bool {
    let listens = LISTENS.load(Ordering::Relaxed);
    if listens {
        // Who has asked before is who is answered.
        let _ = SIGNAL.compare_exchange(0, SIGPIPE as u8, Ordering::Relaxed, Ordering::Relaxed);
    }
    listens
}

/// Lets a file that grows beyond what the shell allows (`ulimit -f`) be an error of the write, which
/// has a line of its own, instead of the end of the process.
pub(crate) fn survive_file_limits() -> Result<()> {
    flag::register(SIGXFSZ, Arc::default())?;
    Ok(())
}
