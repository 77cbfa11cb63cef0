//! Custom kernels: compiled once and cached, recompiled if the cached file is damaged, and not used if they are
//! switched off or not available.
//!
//! If NVRTC is found these tests compile, with or without a GPU; `BRIMFUL_TEST_DEVICE=cuda:0` runs on a GPU.

use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use std::{env, fs, process, thread};

use crate::fake_compiler::{
    self, alone, assert_passes, compiled, is_alone, is_fake, set_mode, with_fake,
};
use crate::test_device::test_device;
use brimful_torch::ErrorKind;
use brimful_torch::kernels::{self, State, compile, compile_ahead};
use tch::Device;

/// Sets up a cache for this process; tests that inspect it run one at a time.
fn cache() -> (PathBuf, MutexGuard<'static, ()>) {
    static TURN: Mutex<()> = Mutex::new(());
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = FOLDER.get_or_init(|| {
        let folder = env::temp_dir().join(format!("brimful-kernels-{}", process::id()));
        // SAFETY: all tests of this file come here first, one at a time, before they compile anything.
        unsafe { env::set_var("XDG_CACHE_HOME", &folder) };
        folder
    });
    let kernels = folder.join("brimful/kernels");
    let _ = fs::remove_dir_all(&kernels);
    (kernels, turn)
}

const FORWARD: [&str; 7] =
    ["KIND=F32", "WIDTH=4", "LANES=16", "THREADS=512", "PASS=WHOLE", "RELU=1", "RESIDUAL=0"];

/// Compiles; returns none if there is no compiler here, which the error must then report.
fn forward(architecture: i32) -> Option<bool> {
    match compile("batch_norm_forward.cu", &FORWARD, architecture) {
        Ok(compiled) => Some(compiled.from_cache),
        Err(error) if error.message.contains("NVRTC") && !test_device().is_cuda() => None,
        Err(error) => panic!("{error}"),
    }
}

fn files(folder: &PathBuf) -> Vec<PathBuf> {
    let entries =
        fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("a file").path());
    entries.collect()
}

#[test]
fn a_kernel_is_compiled_once_for_each_architecture_and_set_of_words() {
    let (folder, _turn) = cache();
    let Some(from_cache) = forward(90) else { return };
    assert!(!from_cache);
    assert_eq!(forward(90), Some(true));
    assert_eq!(forward(80), Some(false), "another architecture is another kernel");
    let mut words = FORWARD;
    words[5] = "RELU=0";
    let other = compile("batch_norm_forward.cu", &words, 90).expect("compiles");
    assert!(!other.from_cache, "other words are another kernel");
    assert_eq!(files(&folder).len(), 3, "and nothing else is left");
}

#[test]
fn a_damaged_or_foreign_file_is_compiled_anew() {
    let (folder, _turn) = cache();
    if forward(90).is_none() {
        return;
    }
    let file = files(&folder).remove(0);
    let whole = fs::read(&file).expect("the kernel");
    let mut flipped = whole.clone();
    *flipped.last_mut().expect("bytes") ^= 1;
    let shorter = whole[..whole.len() / 2].to_vec();
    for damaged in [flipped, shorter, Vec::new(), b"somebody else's\n\x7fELF".to_vec()] {
        fs::write(&file, &damaged).expect("written");
        assert_eq!(forward(90), Some(false), "{} bytes of {}", damaged.len(), whole.len());
        assert_eq!(fs::read(&file).expect("the kernel"), whole);
    }
}

#[test]
fn a_cache_that_cannot_be_written_to_is_done_without() {
    let (folder, _turn) = cache();
    let parent = folder.parent().expect("a folder");
    fs::create_dir_all(parent).expect("made");
    fs::write(&folder, "a file in the folder's place").expect("written");
    if let Some(from_cache) = forward(90) {
        assert!(!from_cache);
        assert_eq!(forward(90), Some(false));
    }
    fs::remove_file(&folder).expect("removed");
}

#[test]
fn a_source_that_is_not_there_or_does_not_compile_is_an_error_that_says_so() {
    let (_folder, _turn) = cache();
    let error = compile("nothing.cu", &[], 90).expect_err("no such source");
    assert!(error.message.contains("nothing.cu"), "{error}");
    if forward(90).is_none() {
        return;
    }
    let error = compile("batch_norm_forward.cu", &["KIND=Roman"], 90).expect_err("no such kind");
    assert!(error.message.contains("Roman"), "{error}");
}

#[test]
fn all_variants_of_batch_norm_compile() {
    let (_folder, _turn) = cache();
    if forward(80).is_none() {
        return;
    }
    let readings = [
        ["KIND=Bf16", "WIDTH=8", "LANES=8"],
        ["KIND=F16", "WIDTH=8", "LANES=4"],
        ["KIND=F16", "WIDTH=1", "LANES=32"],
        ["KIND=F32", "WIDTH=1", "LANES=1"],
    ];
    let backward = ["MASK=2", "MORE=1", "KEEP=1", "OTHER=0", "POOL=0", "PASS=WHOLE"];
    for reading in readings {
        let with = |words: &[&'static str]| [&reading[..], &["THREADS=512"], words].concat();
        compile("batch_norm_forward.cu", &with(&["PASS=WHOLE", "RELU=1", "RESIDUAL=1"]), 80)
            .unwrap_or_else(|error| panic!("{reading:?}: {error}"));
        compile("batch_norm_backward.cu", &with(&backward), 80)
            .unwrap_or_else(|error| panic!("{reading:?}: {error}"));
        compile("batch_norm_pool.cu", &with(&[]), 80)
            .unwrap_or_else(|error| panic!("{reading:?}: {error}"));
    }
}

#[test]
fn what_is_compiled_ahead_is_compiled_once_and_the_same() {
    let (folder, _turn) = cache();
    let Some(_) = forward(90) else { return };
    let plain = compile("batch_norm_forward.cu", &FORWARD, 90).expect("compiles").bytes;
    fs::remove_dir_all(&folder).expect("removed");
    let residuals = ["RESIDUAL=0", "RESIDUAL=1", "RESIDUAL=2"];
    let words = residuals.map(|residual| [&FORWARD[..6], &[residual]].concat());
    for words in words.iter().chain(&words) {
        compile_ahead("batch_norm_forward.cu", words, 90).expect("taken");
    }
    let ahead = words.each_ref().map(|words| {
        let first = compile("batch_norm_forward.cu", words, 90).expect("compiles");
        let second = compile("batch_norm_forward.cu", words, 90).expect("compiles");
        assert!(second.from_cache, "{words:?}");
        assert_eq!(first.bytes, second.bytes, "{words:?}");
        first.bytes
    });
    assert_eq!(ahead[0], plain);
    assert_eq!(files(&folder).len(), 3, "and nothing else is left");
    let error = compile_ahead("none.cu", &[], 90).expect_err("there is none").message;
    assert!(error.contains("none.cu"), "{error}");
}

/// Variable with the milliseconds after which the program that compiles ahead exits; unset in all other programs.
const LEAVES_AFTER: &str = "BRIMFUL_TEST_LEAVES_AFTER";

/// Body of the next test, run in a separate process.
#[test]
fn a_program_that_ends_early() {
    let Ok(milliseconds) = env::var(LEAVES_AFTER) else { return };
    for residual in ["RESIDUAL=0", "RESIDUAL=1", "RESIDUAL=2"] {
        for relu in ["RELU=0", "RELU=1"] {
            let words = [&FORWARD[..5], &[relu, residual]].concat();
            compile_ahead("batch_norm_forward.cu", &words, 90).expect("taken");
        }
    }
    thread::sleep(Duration::from_millis(milliseconds.parse().expect("a number")));
}

#[test]
fn a_program_may_end_while_kernels_are_compiled() {
    let (folder, _turn) = cache();
    for milliseconds in ["0", "100", "200", "400"] {
        let _ = fs::remove_dir_all(&folder);
        let ended = Command::new(env::current_exe().expect("this program"))
            .args(["--exact", "kernels_cache::a_program_that_ends_early"])
            .env(LEAVES_AFTER, milliseconds)
            .output()
            .expect("it starts");
        assert!(ended.status.success(), "after {milliseconds} ms: {:?}", ended.status);
    }
}

#[test]
fn a_switch_turns_them_off_and_the_state_says_why() {
    let (_folder, _turn) = cache();
    assert!(kernels::enabled());
    kernels::set_enabled(false);
    assert_eq!(kernels::state(test_device()), State::Off);
    kernels::set_enabled(true);
    match kernels::state(test_device()) {
        State::Used(how) => assert!(how.contains("sm_") && how.contains("NVRTC"), "{how}"),
        state => assert!(!test_device().is_cuda(), "{state}"),
    }
    let State::Unavailable(why) = kernels::state(Device::Cpu) else { panic!("a CPU has none") };
    assert!(why.contains("CUDA"), "{why}");
}

/// Returns whether the next compilation is served from the cache.
fn is_kept() -> bool {
    compiled(90).expect("compiled").from_cache
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).expect("it is there").permissions().mode() & 0o777
}

#[test]
fn a_cache_that_others_may_write_to_is_not_used() {
    if !is_alone() {
        return assert_passes(&mut with_fake("a_cache_that_others_may_write_to_is_not_used"));
    }
    let folder = Path::new(&env::var_os("XDG_CACHE_HOME").expect("set")).join("brimful/kernels");
    assert!(!is_kept() && is_kept());
    let file = files(&folder).remove(0);
    assert_eq!((mode(&folder), mode(&file)), (0o700, 0o600));
    for loose in [0o620, 0o602] {
        set_mode(&file, loose);
        assert!(!is_kept(), "a file that others may write to");
        assert!(is_kept() && mode(&file) == 0o600, "another is in its place");
    }
    let elsewhere = folder.with_file_name("elsewhere");
    fs::rename(&file, &elsewhere).expect("moved");
    symlink(&elsewhere, &file).expect("a link");
    assert!(!is_kept(), "what a link leads to");
    assert!(is_kept() && !file.is_symlink());
    for loose in [0o770, 0o707] {
        set_mode(&folder, loose);
        assert!(!is_kept(), "a folder that others may have written to");
        assert!(is_kept() && mode(&folder) == 0o700, "it is ours alone again");
    }
    // Only the superuser can give files away.
    const NOBODY: Option<u32> = Some(65_534);
    if chown(&file, NOBODY, None).is_ok() {
        assert!(!is_kept(), "another's file");
        assert!(is_kept());
        chown(&folder, NOBODY, None).expect("given away");
        assert!(!is_kept() && !is_kept(), "another's folder");
    }
}

#[test]
fn a_name_that_is_taken_is_not_written_through() {
    if !is_alone() {
        return assert_passes(&mut with_fake("a_name_that_is_taken_is_not_written_through"));
    }
    let folder = Path::new(&env::var_os("XDG_CACHE_HOME").expect("set")).join("brimful/kernels");
    assert!(!is_kept());
    let file = files(&folder).remove(0);
    fs::remove_file(&file).expect("removed");
    let (precious, mut name) = (folder.with_file_name("precious"), file.into_os_string());
    fs::write(&precious, "untouched").expect("written");
    // Name of the next temporary file.
    name.push(format!(".{}.1", process::id()));
    symlink(&precious, &name).expect("a link");
    assert!(!is_kept());
    assert_eq!(fs::read_to_string(&precious).expect("a file"), "untouched");
}

#[test]
fn a_compiler_without_memory_is_out_of_memory_and_asked_again() {
    let name = "a_compiler_without_memory_is_out_of_memory_and_asked_again";
    if !is_alone() {
        return assert_passes(with_fake(name).env("FAKE_FULL", "1"));
    }
    match compiled(90) {
        Err(error) => assert_eq!(error.kind, ErrorKind::OutOfMemory, "{error}"),
        Ok(kernel) => assert!(!is_fake(&kernel), "the first one fails"),
    }
    assert!(compiled(90).is_ok());
}

#[test]
fn without_a_thread_to_compile_ahead_whoever_needs_a_kernel_compiles_it() {
    let name = "without_a_thread_to_compile_ahead_whoever_needs_a_kernel_compiles_it";
    if !is_alone() {
        let program = with_fake(name);
        // Sets the stack size of threads larger than any memory. `timeout` ends a process that hangs.
        let script = "ulimit -s 1099511627776 && exec timeout 60 \"$0\" \"$@\"";
        let mut limited = Command::new("sh");
        limited.args(["-c", script]).arg(program.get_program()).args(program.get_args());
        limited.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
        return assert_passes(&mut limited);
    }
    assert!(!compiled(80).expect("compiled").from_cache);
    let architectures = [86, 89, 90, 100];
    for architecture in architectures {
        compile_ahead("fill.cu", &[], architecture).expect("taken");
    }
    for architecture in architectures {
        assert!(compiled(architecture).is_ok());
    }
}

#[test]
fn a_compiler_where_others_may_write_is_not_loaded() {
    let name = "a_compiler_where_others_may_write_is_not_loaded";
    if is_alone() {
        let found = compiled(90);
        // A real compiler that the loader finds by itself makes this test meaningless.
        if found.as_ref().is_ok_and(|kernel| !is_fake(kernel)) {
            return;
        }
        let refusal = found.err().map(|error| error.message);
        let expected = env::var("BRIMFUL_TEST_EXPECTS").ok();
        assert_eq!(refusal.is_some(), expected.is_some(), "{refusal:?}");
        let (refusal, expected) = (refusal.unwrap_or_default(), expected.unwrap_or_default());
        return assert!(refusal.contains(&expected), "{refusal}");
    }
    let [cuda, beside] =
        ["neighbours/cuda/lib", "neighbours/beside/lib"].map(fake_compiler::folder);
    // Folders next to a loaded CUDA library are searched.
    let [preloaded, found] = [cuda.join("libcudart_fake.so"), beside.join("libnvrtc.so.13")];
    for library in [&preloaded, &found] {
        fs::copy(fake_compiler::library(), library).expect("copied");
    }
    let program = || {
        let mut program = alone(name);
        program.env("LD_PRELOAD", &preloaded);
        program
    };
    assert_passes(&mut program());
    let place = beside.to_str().expect("a plain name");
    for (loose, mode) in [(&found, 0o757), (&beside, 0o775)] {
        let before = fs::metadata(loose).expect("there").permissions();
        set_mode(loose, mode);
        assert_passes(program().env("BRIMFUL_TEST_EXPECTS", place));
        fs::set_permissions(loose, before).expect("as before");
    }
    // Only those who may write to an already loaded library are trusted with its neighbours.
    set_mode(&preloaded, 0o775);
    set_mode(&found, 0o775);
    assert_passes(&mut program());
    set_mode(&found, 0o757);
    assert_passes(program().env("BRIMFUL_TEST_EXPECTS", place));
    set_mode(&preloaded, 0o755);
    set_mode(&found, 0o755);
    // In a sticky folder others may add files, but not replace ours.
    set_mode(beside.parent().expect("a folder"), 0o1777);
    assert_passes(&mut program());
    fs::rename(&found, cuda.join("libnvrtc.so.13")).expect("moved");
    set_mode(&cuda, 0o1777);
    assert_passes(&mut program());
    set_mode(&cuda.join("libnvrtc.so.13"), 0o757);
    assert_passes(program().env("BRIMFUL_TEST_EXPECTS", cuda.to_str().expect("a plain name")));
}

#[test]
fn the_environments_switch_has_words_for_on_and_off_and_others_are_reported() {
    let name = "the_environments_switch_has_words_for_on_and_off_and_others_are_reported";
    if let Ok(expected) = env::var("BRIMFUL_TEST_EXPECTS") {
        assert_eq!(kernels::enabled(), expected == "on");
        let told = kernels::refusals();
        assert_eq!(told.len(), usize::from(expected == "neither"));
        for word in ["BRIMFUL_KERNELS", "maybe", "on", "off"] {
            assert!(told.iter().all(|line| line.contains(word)), "{told:?}");
        }
        return;
    }
    let on = ["", "ON"].map(|value| (value, "on"));
    let off = ["OFF", "0", "false"].map(|value| (value, "off"));
    for (value, expected) in on.into_iter().chain(off).chain([("maybe", "neither")]) {
        let mut program = alone(name);
        program.env("BRIMFUL_KERNELS", value).env("BRIMFUL_TEST_EXPECTS", expected);
        assert_passes(&mut program);
    }
}
