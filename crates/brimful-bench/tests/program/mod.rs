//! The program under test, and folders for what it writes.

#![allow(dead_code, reason = "not every test uses all of it")]

use std::fs;
use std::path::PathBuf;

use assert_cmd::Command;
use assert_cmd::assert::Assert;
use predicates::prelude::predicate;
use serde_json::Value;

/// What becomes of the program with these words, whatever the caller has exported.
pub fn run(line: &str) -> Assert {
    let mut command = Command::new(env!("CARGO_BIN_EXE_brimful-bench"));
    command.env_remove("LD_LIBRARY_PATH").env_remove("LIBTORCH").env_remove("RUST_BACKTRACE");
    command.args(line.split_whitespace()).assert()
}

/// A line that is refused in these words.
pub fn refused(line: &str, words: &str) {
    run(line).failure().stderr(predicate::str::contains(words.to_owned()));
}

/// A folder of this test's own.
pub fn folder(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).expect("a folder");
    path
}

/// The rows that a benchmark writes as they come, which its last line must have all of; and its environment.
pub fn rows(line: &str) -> (Vec<Value>, Value) {
    let output = run(&format!("{line} --json")).success().get_output().stdout.clone();
    let text = String::from_utf8(output).expect("text");
    let mut rows: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect();
    let last = rows.pop().expect("a last line");
    assert_eq!((&last["done"], &last["rows"]), (&Value::Bool(true), &Value::Array(rows.clone())));
    (rows, last["environment"].clone())
}

/// Who has a row.
pub fn contestants(rows: &[Value]) -> Vec<&str> {
    rows.iter().map(|row| row["contestant"].as_str().expect("a name")).collect()
}
