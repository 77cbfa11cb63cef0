//! Idle threads of libtorch. On a busy machine, threads that spin take time from those that compute.

use std::env;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Number of spins, some ten microseconds, after which an idle thread sleeps.
const SPINS: (&str, &str) = ("GOMP_SPINCOUNT", "10000");
/// Other variables that set how threads wait.
const SAID: [&str; 2] = ["OMP_WAIT_POLICY", "KMP_BLOCKTIME"];

/// Restarts the program in this process, with idle threads that soon sleep. OpenMP's library reads its variables when
/// it is loaded, before `main`. Returns if the environment already sets how threads wait, as it does after a restart,
/// if it allows one thread only, or if the restart fails.
pub(crate) fn sleep_soon() {
    if env::var_os("OMP_NUM_THREADS").is_some_and(|threads| threads == "1") {
        return;
    }
    if SAID.iter().chain([&SPINS.0]).any(|name| env::var_os(name).is_some()) {
        return;
    }
    let mut words = env::args_os();
    if let (Some(name), Ok(program)) = (words.next(), env::current_exe()) {
        // If the restart fails, the program runs on, slower on a busy machine.
        let _refused = Command::new(program).arg0(name).args(words).env(SPINS.0, SPINS.1).exec();
    }
}
