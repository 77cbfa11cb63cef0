//! Tests in a separate process, with a fake compiler that turns every kernel into the same few bytes, so that
//! they run without NVRTC.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::{env, fs, process};

use brimful_torch::TorchError;
use brimful_torch::kernels::{CompiledKernel, compile};

/// Variable set in such a process.
const ALONE: &str = "BRIMFUL_TEST_ALONE";

/// Length of the fake's kernels.
const BYTES: usize = 27;

pub fn is_alone() -> bool {
    env::var_os(ALONE).is_some()
}

/// Creates folders for this process that no other user may write to.
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

/// Returns the fake compiler, as a library.
pub fn library() -> &'static Path {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    MADE.get_or_init(|| {
        let library = folder("fake").join("libnvrtc.so.13");
        let source =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/suite/fake_compiler/fake.cpp");
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

/// Returns a command that runs this test in a separate process with its own cache; the caller sets how it finds
/// the fake.
pub fn alone(test: &str) -> Command {
    let mut command = Command::new(env::current_exe().expect("this program"));
    command.args(["--exact", &format!("kernels_cache::{test}"), "--nocapture"]).env(ALONE, "1");
    command.env("XDG_CACHE_HOME", folder(&format!("{test}/cache")));
    command
}

/// Returns [`alone`]'s command, with the fake first in the loader's path.
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

/// Compiles for an architecture; each architecture is a separate kernel.
pub fn compiled(architecture: i32) -> Result<CompiledKernel, TorchError> {
    compile("fill.cu", &[], architecture)
}

/// Returns whether the fake compiled the kernel, not a real compiler that was loaded before.
pub fn is_fake(kernel: &CompiledKernel) -> bool {
    kernel.bytes == BYTES
}
