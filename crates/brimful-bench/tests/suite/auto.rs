//! Tests of `brimful-bench auto`: sizes found within a limit, beside the best possible ones.

use predicates::prelude::*;
use serde_json::Value;

const AUTO: &str = "auto --device cpu --model mlp";

/// Two limits; the first does not even hold the model.
const LIMITS: &str = "--memory-limit 4MB,40MB --batch-size 256";

#[test]
fn a_limit_that_is_too_small_is_a_row_and_the_next_one_is_measured() {
    let (rows, _) = crate::program::rows(&format!("{AUTO} {LIMITS}"));
    let [small, large] = rows.as_slice() else { panic!("two rows, not {rows:?}") };
    assert_eq!(small["error"], "one sample does not fit");
    assert_eq!(
        (small["limit_bytes"].as_u64(), &small["samples_per_s"]),
        (Some(4_000_000), &Value::Null)
    );

    assert_eq!((large["batch"].as_u64(), &large["error"]), (Some(256), &Value::Null));
    let largest = &large["largest"];
    assert_eq!(largest["size"], largest["feasible"], "{large}");
    for size in [&largest["size"], &large["micro_batch"], &large["best"]["size"]] {
        assert!((1..=256).contains(&size.as_u64().expect("a size")), "{large}");
    }
    assert!(large["peak_bytes"].as_u64() <= Some(40_000_000), "{large}");
    for rate in [&large["samples_per_s"], &large["ratio_to_fixed"], &large["best"]["ratio"]] {
        assert!(rate.as_f64() > Some(0.0), "{large}");
    }
}

#[test]
fn people_read_lines() {
    let words = predicate::str::contains("limit_bytes 3.81 MiB, model mlp")
        .and(predicate::str::contains("error out of memory in arena"))
        .and(predicate::str::contains("limit_bytes 38.1 MiB, micro_batch "));
    crate::program::run(&format!("{AUTO} {LIMITS} --steps-only")).success().stdout(words);
}

#[test]
fn what_cannot_be_measured_is_refused() {
    for (flags, code, words) in [
        ("", 2, "give --memory-limit at least one number of bytes, or say --table"),
        ("--memory-limit 4MB --batch-size 256", 3, "raise --memory-limit"),
        ("--cuda-graphs --memory-limit 40MB", 2, "--steps-only"),
        ("--table", 2, "cannot be used with"),
    ] {
        let said = predicate::str::contains(words);
        crate::program::run(&format!("{AUTO} {flags}")).code(code).stderr(said);
    }
}
