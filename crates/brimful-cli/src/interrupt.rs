//! Ctrl-C and SIGTERM: the first asks for an end after the running step, the second ends at once. Output that
//! nobody reads any more asks for it too.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;

use anyhow::Result;
use signal_hook::consts::{SIGINT, SIGPIPE, SIGTERM, SIGXFSZ};
use signal_hook::flag;
use signal_hook::iterator::Signals;

use crate::exit::Exit;
use crate::progress;

/// What the running command looks at, once it can be asked.
static LISTENING: OnceLock<Interrupt> = OnceLock::new();

/// Whether somebody has asked for the end.
#[derive(Debug, Clone)]
pub(crate) struct Interrupt {
    /// The signal, or 0.
    signal: Arc<AtomicU8>,
}

impl Interrupt {
    /// Listens from now on, until the process ends.
    pub(crate) fn listen() -> Result<Self> {
        if let Some(listening) = LISTENING.get() {
            return Ok(listening.clone());
        }
        let (signal, asked) = (Arc::new(AtomicU8::new(0)), Arc::new(AtomicBool::new(false)));
        for known in [SIGINT, SIGTERM] {
            let at_once = Exit::Interrupted { signal: known as u8 }.code();
            flag::register_conditional_shutdown(known, at_once.into(), Arc::clone(&asked))?;
        }
        let mut signals = Signals::new([SIGINT, SIGTERM])?;
        let noted = Arc::clone(&signal);
        thread::Builder::new().name("signals".into()).spawn(move || {
            if let Some(first) = signals.forever().next() {
                noted.store(first as u8, Ordering::Relaxed);
                asked.store(true, Ordering::Relaxed);
                progress::say("brimful: finishing the step; once more ends at once");
            }
        })?;
        Ok(LISTENING.get_or_init(|| Self { signal }).clone())
    }

    /// How the program is to end, where somebody has asked.
    pub(crate) fn asked(&self) -> Option<Exit> {
        match self.signal.load(Ordering::Relaxed) {
            0 => None,
            signal => Some(Exit::Interrupted { signal }),
        }
    }
}

/// Asks for the end because nobody reads the output any more. Gives whether the running command ends in order,
/// with what it has done so far saved.
pub(crate) fn ask_unread() -> bool {
    let Some(Interrupt { signal }) = LISTENING.get() else { return false };
    // Who has asked before is who is answered.
    let _ = signal.compare_exchange(0, SIGPIPE as u8, Ordering::Relaxed, Ordering::Relaxed);
    true
}

/// Lets a file that grows beyond what the shell allows (`ulimit -f`) be an error of the write, which
/// has a line of its own, instead of the end of the process.
pub(crate) fn survive_file_limits() -> Result<()> {
    flag::register(SIGXFSZ, Arc::default())?;
    Ok(())
}
