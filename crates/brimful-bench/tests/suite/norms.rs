//! Tests of `brimful-bench norms`: exact BatchNorms beside deferred ones, and alone within a limit.

use crate::program::{contestants, rows, run};
use predicates::prelude::*;

const NORMS: &str = "norms --device cpu --model resnet18 --image 32";

#[test]
fn exact_and_deferred_take_turns_and_agree_where_nothing_is_cut() {
    let flags = "--batch-size 2,4 --micro-batch-size 4 --dtype f64 --repeats 1";
    let (rows, environment) = rows(&format!("{NORMS} {flags}"));
    assert_eq!(contestants(&rows), ["brimful, deferred", "brimful, exact"].repeat(2));
    let batches: Vec<_> = rows.iter().filter_map(|row| row["batch"].as_u64()).collect();
    assert_eq!(batches, [2, 2, 4, 4]);
    for pair in rows.chunks(2) {
        let [deferred, exact] = [0, 1].map(|at| pair[at]["loss"].as_f64().expect("a loss"));
        assert!((deferred - exact).abs() < 1e-10, "{deferred} and {exact}");
        assert_eq!(pair[0]["ratio"].as_f64(), Some(1.0));
        assert!(pair[1]["ratio"].as_f64() > Some(0.0), "{}", pair[1]);
        assert!(pair[1]["peak_bytes"].as_u64() > Some(1 << 20), "{}", pair[1]);
        assert!(pair[1]["memory_limit"].is_null());
    }
    assert!(rows[1]["peak_ratio"].is_null() && rows[3]["peak_ratio"].as_f64() > Some(1.0));
    assert_eq!(environment["channels_last"], false);
}

#[test]
fn within_a_limit_exact_runs_alone_and_its_peak_stays_below_it() {
    let flags = "--batch-size 8,32 --micro-batch-size 4 --memory-limit 170MB --repeats 1";
    let (rows, _) = rows(&format!("{NORMS} {flags}"));
    assert_eq!(contestants(&rows), ["brimful, exact"; 2]);
    for row in &rows {
        assert_eq!(row["memory_limit"].as_str(), Some("162 MiB"));
        assert!(row["peak_bytes"].as_u64() <= Some(170_000_000), "{row}");
        assert!(row["ratio"].is_null());
    }
    assert!(rows[1]["peak_ratio"].as_f64() > Some(0.0), "{}", rows[1]);
}

#[test]
fn people_read_lines_and_a_model_without_exact_norms_is_refused() {
    let lines = predicate::str::contains("brimful, exact: batch 3, ")
        .and(predicate::str::contains("micro_batch 2, model resnet18, "));
    let flags = "--batch-size 3 --micro-batch-size 2 --repeats 1";
    run(&format!("{NORMS} {flags}")).success().stdout(lines);
    let refused = run("norms --device cpu --model mlp").code(2);
    refused.stderr(predicate::str::contains("--model is mlp"));
}
