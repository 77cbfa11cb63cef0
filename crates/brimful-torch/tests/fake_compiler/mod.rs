//! Tests that are programs of their own, with a compiler that makes the same few bytes of every kernel: so they run
//! where there is no NVRTC.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::{env, fs, process};

use brimful_torch::TorchError;
use brimful_torch::kernels::{CompiledKernel, compile};

/// Set in such a program.
const ALONE: &str = "BRIMFUL_TEST_ALONE";

/// How long the fake's kernels are.
const BYTES: usize = 27;

pub fn is_alone() -> bool {
    env::var_os(ALONE).is_some()
}

/// Folders of this program's own, which others may not write to.
pub fn folder(name: &str) -> PathBuf {
    let all = env::temp_dir().join(format!("brimful-alone-{}", process::id()));
    let folder = all.join(name);
    fs::create_dir_all(&folder).expect("made");
    for at in folder.ancestors().take_while(|at| at.starts_with(&all)) {
        set_mode(at, 0o755);
    }
    folder
}

pub fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("a new mode");
}

/// The fake, as a library.
pub fn library() -> &'static Path {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    MADE.get_or_init(|| {
        let library = folder("fake").join("libnvrtc.so.13");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_compiler/fake.cpp");
        let compiler = env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
        let mut words = compiler.split_whitespace();
        let status = Command::new(words.next().expect("a compiler"))
            .args(words)
            .args(["-shared", "-fPIC", "-o"])
            .args([&library, &source])
            .status();
        assert!(status.expect("a C++ compiler").success());
        set_mode(&library, 0o755);
        library
    })
}

/// This test as a program of its own, with a cache of its own; where the program finds the fake is left to be said.
pub fn alone(test: &str) -> Command {
    let mut command = Command::new(env::current_exe().expect("this program"));
    command.args(["--exact", test, "--nocapture"]).env(ALONE, "1");
    command.env("XDG_CACHE_HOME", folder(&format!("{test}/cache")));
    command
}

/// The same, with the fake where the loader finds it first.
pub fn with_fake(test: &str) -> Command {
    let mut folders = vec![library().parent().expect("a folder").to_owned()];
    folders.extend(env::split_paths(&env::var_os("LD_LIBRARY_PATH").unwrap_or_default()));
    let mut command = alone(test);
    command.env("LD_LIBRARY_PATH", env::join_paths(folders).expect("paths"));
    command
}

pub fn assert_passes(command: &mut Command) {
    let ended = command.output().expect("it starts");
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, error) = (said(&ended.stdout), said(&ended.stderr));
    assert!(ended.status.success(), "{}\n{out}{error}", ended.status);
    assert!(out.contains("1 passed"), "{out}");
}

/// Compiles for an architecture, each of which is a kernel of its own.
pub fn compiled(architecture: i32) -> Result<CompiledKernel, TorchError> {
    compile("fill.cu", &[], architecture)
}

/// Whether it is the fake that compiles, not a true one that was loaded before.
pub fn is_fake(kernel: &CompiledKernel) -> bool {
    kernel.bytes == BYTES
}
