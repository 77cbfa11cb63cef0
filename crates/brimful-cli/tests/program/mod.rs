//! The program under test, and folders for what it writes.

#![allow(dead_code, reason = "not every test uses all of it")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command as Process, Stdio};

use assert_cmd::Command;
use assert_cmd::assert::Assert;
use brimful::save::{self, Metadata};
use image::{Rgb, RgbImage};
use predicates::prelude::*;
use predicates::str::RegexPredicate;
use serde_json::Value;
use tch::Tensor;

/// The program as a process of its own, whatever the caller has exported.
pub fn process() -> Process {
    let mut process = Process::new(env!("CARGO_BIN_EXE_brimful"));
    process.env_remove("LD_LIBRARY_PATH").env_remove("LIBTORCH").env_remove("RUST_BACKTRACE");
    process
}

/// The same, to be looked at when it has ended.
pub fn brimful() -> Command {
    process().into()
}

/// What becomes of it with these words.
pub fn run(line: &str) -> Assert {
    brimful().args(line.split_whitespace()).assert()
}

/// A text that is like this pattern.
pub fn like(pattern: &str) -> RegexPredicate {
    predicate::str::is_match(pattern).expect("a pattern")
}

/// With these words it ends with this code, and says why on standard error.
pub fn refused(line: &str, code: i32, why: &str) -> Assert {
    run(line).code(code).stderr(predicate::str::contains(why))
}

/// The same in one line of its own.
pub fn complains(line: &str, code: i32, why: &str) -> Assert {
    let is_one_line = predicate::function(|text: &str| text.lines().count() == 1);
    refused(line, code, why).stderr(predicate::str::starts_with("brimful: ").and(is_one_line))
}

/// What becomes of it in a folder.
pub fn run_in(folder: &Path, line: &str) -> Assert {
    brimful().current_dir(folder).args(line.split_whitespace()).assert()
}

/// What becomes of a training on a CPU, in a folder.
pub fn train_in(folder: &Path, line: &str) -> Assert {
    run_in(folder, &format!("train --device cpu {line}"))
}

/// Starts it in a folder, to be waited for, asked or killed.
pub fn start_in(folder: &Path, line: &str) -> Child {
    let mut process = process();
    process.current_dir(folder).args(line.split_whitespace());
    process.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("a run")
}

/// The lines of JSON that it prints.
pub fn lines(line: &str) -> Vec<Value> {
    json_lines(&run(line).success())
}

/// Those that a run has printed.
pub fn json_lines(run: &Assert) -> Vec<Value> {
    stdout(run).lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

pub fn stdout(run: &Assert) -> String {
    String::from_utf8(run.get_output().stdout.clone()).expect("text")
}

pub fn stderr(run: &Assert) -> String {
    String::from_utf8(run.get_output().stderr.clone()).expect("text")
}

/// The tensors of a saved run, and what it says.
pub fn saved(path: impl AsRef<Path>) -> (Vec<(String, Tensor)>, Metadata) {
    save::read(path).expect("a saved run")
}

/// Two saved runs have the same tensors, but for rounding.
pub fn assert_alike(one: impl AsRef<Path>, other: impl AsRef<Path>) {
    let (one, other) = (saved(one).0, saved(other).0);
    assert_eq!(one.len(), other.len());
    for ((name, expected), (name_too, got)) in one.iter().zip(&other) {
        assert_eq!(name, name_too);
        assert!(got.allclose(expected, 1e-9, 1e-9, false), "{name} differs");
    }
}

/// A folder of this test's own.
pub fn folder(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).expect("a folder");
    path
}

/// A file of some 60 sequences to train on.
pub fn text(folder: &Path) -> String {
    let path = folder.join("text");
    fs::write(&path, "A stage is consecutive layers on one device. ".repeat(100)).expect("written");
    path.display().to_string()
}

/// A picture in warm or cold colours, with a grain of its own.
pub fn picture(width: u32, height: u32, warm: bool, grain: u32) -> RgbImage {
    RgbImage::from_fn(width, height, |x, y| {
        let grain = ((x * 7 + y * 13 + grain * 29) % 40) as u8;
        if warm { Rgb([200 + grain, 90, grain]) } else { Rgb([grain, 90, 200 + grain]) }
    })
}

/// The names of what is in a folder.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder");
    let mut names: Vec<_> = entries
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}
