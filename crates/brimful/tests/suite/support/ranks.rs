//! Runs a test's body in several processes, by the real `mpirun`.
//!
//! The test program starts itself again under `mpirun`, for that one test; there, the body runs as a rank. A
//! hanging test is ended with a message.

use std::env;
use std::io::Read;
use std::process::{Child, Command, Output, Stdio};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use brimful::World;
use tempfile::TempDir;

/// Variable of ranks with the test's name.
const RANK_OF: &str = "BRIMFUL_TEST_RANK_OF";
/// Variable of ranks with the test's message.
const TOLD: &str = "BRIMFUL_TEST_TOLD";
/// Options of `mpirun` for sockets, over which a large message needs its sender to the end.
pub const SOCKETS: [&str; 6] = ["--mca", "pml", "ob1", "--mca", "btl", "self,tcp"];
/// Longest time of a test.
const LIMIT: Duration = Duration::from_secs(120);

/// Runs `body` in this many ranks, which must all succeed.
pub fn in_ranks(ranks: usize, body: impl FnOnce(World)) {
    as_rank_or(body, |launcher| {
        let output = launcher.start(ranks, &[], "").wait(LIMIT);
        assert!(output.status.success(), "{ranks} ranks: {}\n{}", output.status, text(&output));
    });
}

/// Runs `body` as a rank; in the test itself runs `watch`, which starts ranks as needed.
pub fn as_rank_or(body: impl FnOnce(World), watch: impl FnOnce(&Launcher)) {
    as_process_or(|| body(World::start().expect("a world")), watch);
}

/// Runs `body` in a process that `mpirun` has started and that joins no world by itself.
pub fn as_process_or(body: impl FnOnce(), watch: impl FnOnce(&Launcher)) {
    let name = test_name();
    if env::var(RANK_OF).as_deref() == Ok(&name) {
        return body();
    }
    watch(&Launcher { name });
}

/// Returns the message of the test to its ranks.
pub fn reported() -> String {
    env::var(TOLD).unwrap_or_default()
}

/// Returns everything that was printed.
pub fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// Returns the test's name: libtest names its threads after the tests.
fn test_name() -> String {
    thread::current().name().expect("a test's thread has its name").to_owned()
}

/// Starts the ranks of a test.
pub struct Launcher {
    name: String,
}

/// Running ranks.
pub struct Launched {
    pub mpirun: Child,
    /// Folder for `mpirun`'s files: concurrent runs create and remove theirs.
    _folder: TempDir,
}

impl Launcher {
    /// Starts this many ranks, with options for `mpirun` and a message for the ranks.
    pub fn start(&self, ranks: usize, options: &[&str], word: &str) -> Launched {
        let program = env::current_exe().expect("the test's own program");
        let folder = tempfile::tempdir().expect("a folder");
        let mut command = Command::new("mpirun");
        command
            .args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"])
            .args(options)
            .args(["-n", &ranks.to_string()])
            .arg(program)
            .args(["--exact", &self.name, "--nocapture", "--test-threads", "1"])
            .env(RANK_OF, &self.name)
            .env(TOLD, word)
            .env("OMP_NUM_THREADS", "1")
            .env("OMPI_MCA_orte_tmpdir_base", folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mpirun = command.spawn().expect("mpirun is there where this feature is built");
        Launched { mpirun, _folder: folder }
    }
}

impl Launched {
    /// Returns the ranks' output and exit status; the test fails if that takes too long.
    pub fn wait(mut self, limit: Duration) -> Output {
        let (stdout, stderr) = (self.mpirun.stdout.take(), self.mpirun.stderr.take());
        let stdout = thread::spawn(move || read(stdout));
        let stderr = thread::spawn(move || read(stderr));
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.mpirun.try_wait().expect("a child") {
                break Some(status);
            }
            if start.elapsed() > limit {
                break None;
            }
            sleep(Duration::from_millis(20));
        };
        if status.is_none() {
            // `mpirun` passes the signal on to all ranks.
            let pid = self.mpirun.id().to_string();
            let _ = Command::new("kill").args(["-TERM", &pid]).status();
            let _ = self.mpirun.wait();
        }
        let (stdout, stderr) = (stdout.join().expect("read"), stderr.join().expect("read"));
        let Some(status) = status else {
            panic!(
                "the ranks have not ended within {limit:?}\n{}{}",
                String::from_utf8_lossy(&stdout),
                String::from_utf8_lossy(&stderr)
            )
        };
        Output { status, stdout, stderr }
    }
}

fn read(from: Option<impl Read>) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Some(mut from) = from {
        let _ = from.read_to_end(&mut bytes);
    }
    bytes
}
