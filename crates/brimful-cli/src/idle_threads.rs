//! How threads of libtorch wait for work: on a busy machine those that spin take the time of those that compute.

use std::env;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Turns of a loop, some ten microseconds, after which a thread that waits goes to sleep.
const SPINS: (&str, &str) = ("GOMP_SPINCOUNT", "10000");
/// Other variables by which people say how threads wait.
const SAID: [&str; 2] = ["OMP_WAIT_POLICY", "KMP_BLOCKTIME"];

/// Starts the program anew in this process, with threads that soon go to sleep, unless the environment says how they
/// wait: OpenMP's library reads it when it is loaded, which is before `main`. It returns where that was done before, or
/// cannot be.
pub(crate) fn sleep_soon() {
    if SAID.iter().chain([&SPINS.0]).any(|name| env::var_os(name).is_some()) {
        return;
    }
    let mut words = env::args_os();
    if let (Some(name), Ok(program)) = (words.next(), env::current_exe()) {
        // Where the system refuses, it is as slow on a busy machine as it was.
        let _refused = Command::new(program).arg0(name).args(words).env(SPINS.0, SPINS.1).exec();
    }
}
