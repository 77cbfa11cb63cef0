//! The program as people and programs meet it.

mod program;

use predicates::prelude::*;
use program::{lines, run};
use serde_json::Value;

#[test]
fn doctor_says_versions_devices_and_that_all_is_well() {
    run("doctor").success().stdout(
        predicate::str::contains("libtorch  2.11.0")
            .and(predicate::str::contains("to build a crate of yours: export LIBTORCH=/"))
            .and(predicate::str::contains("cpu "))
            .and(predicate::str::contains("Nothing is wrong.")),
    );
}

#[test]
fn doctor_speaks_json() {
    let told = lines("doctor --json");
    let [report] = &told[..] else { panic!("one JSON object, not {told:?}") };
    assert_eq!(report["libtorch"], "2.11.0");
    let folder = std::path::Path::new(report["libtorch_folder"].as_str().expect("a folder"));
    assert!(folder.join("lib/libtorch.so").exists(), "{}", folder.display());
    let cpu = &report["devices"][0];
    assert_eq!(cpu["name"], "cpu");
    assert!(cpu["total_bytes"].as_u64() >= cpu["free_bytes"].as_u64());
    assert_eq!(report["problems"], Value::Array(vec![]));
}

#[test]
fn the_demo_runs_out_and_then_trains() {
    run("demo").success().stdout(
        predicate::str::contains("A plain step:\n  out of memory in arena 'cpu': asked for")
            .and(predicate::str::is_match("epoch  20 .*  9[5-9].. % right").expect("a pattern")),
    );
}
