//! Program under test, and folders for its output.

#![allow(dead_code, reason = "not every test uses all of it")]

use std::fs;
use std::path::PathBuf;

use assert_cmd::Command;
use assert_cmd::assert::Assert;
use predicates::prelude::predicate;
use serde_json::Value;

/// Runs the program with these words, without the caller's exported variables.
pub fn run(line: &str) -> Assert {
    let mut command = Command::new(env!("CARGO_BIN_EXE_brimful-bench"));
    command.env_remove("LD_LIBRARY_PATH").env_remove("LIBTORCH").env_remove("RUST_BACKTRACE");
    command.args(line.split_whitespace()).assert()
}

/// Runs `bench/tables` with these words.
pub fn tables(line: &str) -> Assert {
    let mut command = Command::new("python3");
    command.arg("../../bench/tables").args(line.split_whitespace()).assert()
}

/// Checks that a command line is refused with these words.
pub fn refused(line: &str, words: &str) {
    run(line).failure().stderr(predicate::str::contains(words.to_owned()));
}

/// Creates an empty folder for this test.
pub fn folder(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).expect("a folder");
    path
}

/// Returns the rows that a benchmark writes, which its last line must repeat, and its environment.
pub fn rows(line: &str) -> (Vec<Value>, Value) {
    let output = run(&format!("{line} --json")).success().get_output().stdout.clone();
    let text = String::from_utf8(output).expect("text");
    let mut rows: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect();
    let last = rows.pop().expect("a last line");
    assert_eq!((&last["done"], &last["rows"]), (&Value::Bool(true), &Value::Array(rows.clone())));
    (rows, last["environment"].clone())
}

/// Returns the contestant of each row.
pub fn contestants(rows: &[Value]) -> Vec<&str> {
    rows.iter().map(|row| row["contestant"].as_str().expect("a name")).collect()
}
