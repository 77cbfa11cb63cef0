//! Tests of `brimful-bench memory`: the largest model of each experiment, or none.

use crate::program::{refused, rows, run};
use predicates::prelude::*;

/// Small models in small arenas, without offloaded stages.
const ON_DEVICES: &str = "memory --filters 8 --batch-size 4 --host-memory 0B";

#[test]
fn more_devices_hold_larger_models_and_each_stays_within_its_memory() {
    let flags = "--memory-limit 6MiB --family unet --channels 2 --stages 1,2";
    let (rows, _) = rows(&format!("{ON_DEVICES} {flags}"));
    let experiments: Vec<_> = rows.iter().map(|row| row["experiment"].as_str()).collect();
    assert_eq!(experiments, [Some("naive-1"), Some("pipeline-1"), Some("pipeline-2")]);
    let parameters: Vec<_> = rows.iter().map(|row| row["parameters"].as_u64()).collect();
    assert!(parameters.is_sorted_by(|a, b| a < b), "{parameters:?}");
    for row in &rows {
        let bytes = |key: &str| row[key].as_u64().expect("bytes");
        assert_eq!(bytes("resident_bytes") + bytes("activation_bytes"), bytes("peak_bytes"));
        // Parameters and their gradients.
        assert!(bytes("resident_bytes") >= 8 * bytes("parameters"), "{row}");
        let peaks = row["peaks"].as_array().expect("a peak for each device");
        assert!(peaks.iter().all(|peak| peak.as_u64() <= Some(6 << 20)), "{row}");
    }
}

#[test]
fn offloaded_stages_hold_a_larger_model_in_the_memory_of_one_device() {
    let (rows, _) = rows(
        "memory --filters 8 --memory-limit 3MiB --host-memory 4MiB --family unet --channels 2 --stages 1 \
         --batch-size 1",
    );
    let [_, pipeline, on_host] = &rows[..] else { panic!("{rows:?}") };
    assert_eq!([&pipeline["experiment"], &on_host["experiment"]], ["pipeline-1", "offload-1"]);
    let bytes = |row: &serde_json::Value, key: &str| row[key].as_u64().expect("a number");
    assert!(bytes(on_host, "parameters") > bytes(pipeline, "parameters"), "{on_host}");
    assert!(
        bytes(on_host, "offloaded_stages") > 0 && bytes(pipeline, "offloaded_stages") == 0,
        "{on_host}"
    );
    assert!(bytes(on_host, "peak_bytes") <= 3 << 20, "{on_host}");
    assert!(bytes(on_host, "host_bytes") <= 4 << 20, "{on_host}");
    assert!(["device", "host"].iter().any(|bound| on_host["bound"] == *bound), "{on_host}");
}

#[test]
fn an_experiment_without_a_model_that_fits_says_so_and_the_others_go_on() {
    let flags = "--memory-limit 4MiB --family amoebanet --stages 1";
    run(&format!("{ON_DEVICES} {flags}")).success().stdout(
        predicate::str::contains("error not even amoebanet:3x8 fits, experiment naive-1").and(
            predicate::str::is_match("experiment pipeline-1, .*, model amoebanet:")
                .expect("a pattern"),
        ),
    );
}

#[test]
fn what_cannot_be_measured_is_refused() {
    for (flags, words) in [
        (
            "--memory-limit 64KiB --family amoebanet --stages 1",
            "no model of any size fits 64.0 KiB: raise --memory-limit",
        ),
        ("--stages 0", "give a whole number from 1 on"),
        ("--channels 3 --family unet", "but 3 cannot be halved"),
        ("--device gpu", "gpu"),
    ] {
        refused(&format!("{ON_DEVICES} {flags}"), words);
    }
}
