//! Tests of `brimful-bench micro`: rows as they come, and all of them at the end.

use crate::program::{contestants, refused, rows, run};
use predicates::prelude::*;

#[test]
fn each_contestant_has_a_row_and_the_last_line_has_all() {
    let (rows, environment) =
        rows("micro --device cpu --model mlp --batch-size 10 --micro-batch-size 4 --repeats 2");
    assert_eq!(contestants(&rows), ["tch loop", "brimful", "brimful, batch on device"]);
    for row in &rows {
        assert_eq!((row["model"].as_str(), row["dtype"].as_str()), (Some("mlp"), Some("f32")));
        assert_eq!((row["batch"].as_u64(), row["micro_batch"].as_u64()), (Some(10), Some(4)));
        assert!(row["samples_per_s"].as_f64() > Some(0.0) && row["ratio"].as_f64() > Some(0.0));
        assert!(row["peak_bytes"].as_u64() > Some(1 << 20), "{row}");
        assert_eq!(row["seconds"].as_array().map(Vec::len), Some(2));
    }
    assert_eq!(environment["libtorch"], "2.11.0");
}

#[test]
fn memory_is_compared_by_micro_batches() {
    let flags = "--memory --model mlp --micro-batch-size 16 --training-set 3001";
    let (rows, _) = rows(&format!("micro --device cpu {flags}"));
    let counts: Vec<_> = rows.iter().map(|row| row["micro_batches"].as_u64()).collect();
    assert_eq!(counts, [1, 2, 4, 8, 16, 32, 64, 128, 188].map(Some));
    assert_eq!(rows[8]["batch"].as_u64(), Some(3001));
    for row in &rows[7..] {
        assert_eq!(row["compared_with"].as_u64(), Some(2));
        assert!(row["ratio"].as_f64() < Some(1.01), "{row}");
    }
}

#[test]
fn people_read_lines() {
    run("micro --device cpu --model gpt --gpt 1x64x8 --batch-size 3 --repeats 1").success().stdout(
        predicate::str::contains("brimful, batch on device: batch 3, ")
            .and(predicate::str::contains("micro_batch 2, model gpt, ")),
    );
}

#[test]
fn what_cannot_be_measured_is_refused() {
    for (flags, words) in [
        ("--dtype tf32", "--dtype tf32 is for CUDA devices: use --dtype f32"),
        ("--micro-batch-size 0", "0 is not in 1.."),
        ("--gpt 2x100x8", "a multiple of 64"),
        ("--table --model mlp", "cannot be used with"),
    ] {
        refused(&format!("micro --device cpu {flags}"), words);
    }
}
