//! The program under test, and folders for its output.

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

/// Returns the program as a process, independent of the caller's environment.
pub fn process() -> Process {
    let mut process = Process::new(env!("CARGO_BIN_EXE_brimful"));
    process.env_remove("LD_LIBRARY_PATH").env_remove("LIBTORCH").env_remove("RUST_BACKTRACE");
    process
}

/// Returns the program as a command with assertions.
pub fn brimful() -> Command {
    process().into()
}

/// Runs the program with these arguments.
pub fn run(line: &str) -> Assert {
    brimful().args(line.split_whitespace()).assert()
}

/// Returns a predicate for text that matches this pattern.
pub fn like(pattern: &str) -> RegexPredicate {
    predicate::str::is_match(pattern).expect("a pattern")
}

/// Asserts that the program exits with this code, and says why on standard error.
pub fn refused(line: &str, code: i32, why: &str) -> Assert {
    run(line).code(code).stderr(predicate::str::contains(why))
}

/// Asserts a refusal in exactly one line of the program's own.
pub fn complains(line: &str, code: i32, why: &str) -> Assert {
    let is_one_line = predicate::function(|text: &str| text.lines().count() == 1);
    refused(line, code, why).stderr(predicate::str::starts_with("brimful: ").and(is_one_line))
}

/// Runs the program in a folder.
pub fn run_in(folder: &Path, line: &str) -> Assert {
    brimful().current_dir(folder).args(line.split_whitespace()).assert()
}

/// Runs a training on a CPU, in a folder.
pub fn train_in(folder: &Path, line: &str) -> Assert {
    run_in(folder, &format!("train --device cpu {line}"))
}

/// Starts the program in a folder, to be waited for, interrupted or killed.
pub fn start_in(folder: &Path, line: &str) -> Child {
    let mut process = process();
    process.current_dir(folder).args(line.split_whitespace());
    process.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("a run")
}

/// Returns the lines of JSON that the program prints.
pub fn lines(line: &str) -> Vec<Value> {
    json_lines(&run(line).success())
}

/// Returns the lines of JSON that a run has printed.
pub fn json_lines(run: &Assert) -> Vec<Value> {
    stdout(run).lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

pub fn stdout(run: &Assert) -> String {
    String::from_utf8(run.get_output().stdout.clone()).expect("text")
}

pub fn stderr(run: &Assert) -> String {
    String::from_utf8(run.get_output().stderr.clone()).expect("text")
}

/// Returns the tensors and the metadata of a saved run.
pub fn saved(path: impl AsRef<Path>) -> (Vec<(String, Tensor)>, Metadata) {
    save::read(path).expect("a saved run")
}

/// Asserts that two saved runs have the same tensors up to rounding.
pub fn assert_alike(one: impl AsRef<Path>, other: impl AsRef<Path>) {
    let (one, other) = (saved(one).0, saved(other).0);
    assert_eq!(one.len(), other.len());
    for ((name, expected), (name_too, got)) in one.iter().zip(&other) {
        assert_eq!(name, name_too);
        assert!(got.allclose(expected, 1e-9, 1e-9, false), "{name} differs");
    }
}

/// Makes an empty folder for a test.
pub fn folder(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).expect("a folder");
    path
}

/// Writes a file with some 60 sequences to train on.
pub fn text(folder: &Path) -> String {
    let path = folder.join("text");
    fs::write(&path, "A stage is consecutive layers on one device. ".repeat(100)).expect("written");
    path.display().to_string()
}

/// Makes an image in warm or cold colours, with its own grain.
pub fn picture(width: u32, height: u32, warm: bool, grain: u32) -> RgbImage {
    RgbImage::from_fn(width, height, |x, y| {
        let grain = ((x * 7 + y * 13 + grain * 29) % 40) as u8;
        if warm { Rgb([200 + grain, 90, grain]) } else { Rgb([grain, 90, 200 + grain]) }
    })
}

/// Returns the names of a folder's entries.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder");
    let mut names: Vec<_> = entries
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}
