//! Tests of `brimful-bench pipeline`: a row for each contestant, and a picture.

use std::fs;
use std::path::PathBuf;

use crate::program::{refused, rows, run};
use predicates::prelude::*;
use serde_json::Value;

/// Small model in short steps.
const PIPELINE: &str =
    "pipeline --model mlp --num-micro-batches 4 --micro-batch-size 2 --repeats 1";

#[test]
fn every_schedule_has_a_row_beside_one_thread_and_the_last_line_has_all() {
    let picture = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("pipeline.svg");
    let flags = format!("--stages 1,2 --recompute never,always --svg {}", picture.display());
    let (rows, _) = rows(&format!("{PIPELINE} {flags}"));

    assert_eq!(rows.len(), 2 * (1 + 10 * 2));
    let ours = rows.iter().filter(|row| row["contestant"] == "brimful");
    // A model with few layers does not have four stages on each of two devices.
    let (piped, missing): (Vec<_>, Vec<_>) = ours.partition(|row| row["error"].is_null());
    assert!(missing.iter().all(|row| row["schedule"] == "interleaved-4"), "{missing:?}");
    for row in &piped {
        for key in
            ["samples_per_s", "ratio", "limit", "machine", "of_limit", "simulated", "of_balance"]
        {
            assert!(row[key].as_f64() > Some(0.0), "{key} in {row}");
        }
        assert!(row["peak_bytes"].as_u64() > Some(1 << 20), "{row}");
        assert_eq!((&row["batch"], &row["micro_batches"]), (&8.into(), &4.into()));
    }
    // m s / (m + s - 1), and no bubble with one stage.
    let limit = |stages, schedule, recompute| {
        let is = |row: &&&Value| {
            row["stages"] == stages && row["schedule"] == schedule && row["recompute"] == recompute
        };
        piped.iter().find(is).and_then(|row| row["limit"].as_f64()).expect("a row")
    };
    assert_eq!((limit(1, "gpipe", "never"), limit(2, "1f1b", "never")), (1.0, 8.0 / 5.0));
    assert!(limit(2, "gpipe", "always") < limit(2, "gpipe", "never"));
    // The limit of an automatic schedule is that of its list for equal stages, whatever the measured times are.
    assert!(limit(2, "auto", "never") >= limit(2, "zero-bubble-h1", "never"));
    let picture = fs::read_to_string(picture).expect("a picture");
    assert!(picture.contains("interleaved-2, simulated") && picture.contains("1f1b, measured"));
}

#[test]
fn each_number_of_micro_batches_has_rows_of_its_own() {
    let flags = "--stages 2 --schedule gpipe --num-micro-batches 8";
    let (rows, _) = rows(&format!("{PIPELINE} {flags}"));
    let ours: Vec<_> = rows.iter().filter(|row| row["contestant"] == "brimful").collect();
    let numbers = ours.iter().map(|row| (&row["micro_batches"], &row["batch"], &row["limit"]));
    let numbers: Vec<_> = numbers.collect();
    let expected = [(4, 8, 8.0 / 5.0), (8, 16, 16.0 / 9.0)]
        .map(|(m, batch, limit)| (Value::from(m), Value::from(batch), Value::from(limit)));
    assert_eq!(numbers, expected.iter().map(|(m, b, l)| (m, b, l)).collect::<Vec<_>>());
}

#[test]
fn people_read_lines() {
    run(&format!("{PIPELINE} --stages 2 --schedule 1f1b")).success().stdout(
        predicate::str::contains("one thread: batch 8, ")
            .and(predicate::str::contains("micro_batch 2, micro_batches 4, model mlp"))
            .and(predicate::str::contains("schedule 1f1b, ")),
    );
}

#[test]
fn what_cannot_be_measured_is_refused() {
    for (flags, words) in [
        ("--stages 0", "give a whole number from 1 on"),
        ("--stages 50", "50 stages need at least 50 layers"),
        ("--table", "cannot be used with"),
    ] {
        refused(&format!("{PIPELINE} {flags}"), words);
    }
}
