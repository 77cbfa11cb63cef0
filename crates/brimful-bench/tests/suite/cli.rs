//! Tests of the program's command line: help, exit codes, a config, and its smallest row.

use std::fs;

use crate::program::{folder, rows, run};
use predicates::prelude::*;
use serde_json::Value;

/// Checks a command's exit code and message.
fn ends(arguments: &str, code: i32, says: &str) {
    let run = run(arguments).code(code);
    let stream = predicate::str::contains(says);
    if code == 0 {
        run.stdout(stream)
    } else {
        run.stderr(stream)
    };
}

#[test]
fn every_exit_code_of_the_program_is_its_own() {
    ends("arena --batch-size 1 --image 32 --repeats 1", 0, "resnet50: ");
    ends("--help", 0, "Exit codes:");
    ends("--help", 0, "Examples:\n  brimful-bench ");
    ends("--version", 0, "brimful-bench ");
    ends("arena --config /no/such/file", 1, "brimful-bench: cannot read /no/such/file");
    ends("micro --repeats 0", 2, "0 is not in 1..");
    ends("micros", 2, "'micro'");
    ends("memory --family unet --memory-limit 1MiB -s 1", 3, "raise --memory-limit");
}

#[test]
fn flags_come_from_a_file_too_and_the_arena_bench_prints_its_row() {
    let path = folder("config").join("run.toml");
    let text = "[arena]\nbatch-size = 1\nimage = 32\nrepeats = 1\n\n[micro]\nrepeats = 3\n";
    fs::write(&path, text).expect("written");
    let (rows, _) = rows(&format!("arena --config {}", path.display()));
    let row = &rows[0];
    assert_eq!((&row["batch"], &row["repeats"]), (&Value::from(1), &Value::from(1)));
    assert_eq!(row["model"], "resnet50");
    assert!(row["ratio"].as_f64() > Some(0.0) && row["peak_bytes"].as_u64() > Some(1 << 20));
    fs::write(&path, "[micros]\nrepeats = 3\n").expect("written");
    ends(&format!("arena --config {}", path.display()), 2, "did you mean 'micro'?");
}
