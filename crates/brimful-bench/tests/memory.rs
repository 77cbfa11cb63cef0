//! `brimful-bench memory` as programs meet it: the largest model of each experiment, or none.

mod program;

use assert_cmd::Command;
use predicates::prelude::*;

/// Small models in small arenas.
fn bench_memory(arguments: &[&str]) -> Command {
    let mut command = program::bench();
    command.args(["memory", "--filters", "8"]);
    command.args(arguments);
    command
}

/// Without stages on the host.
fn on_devices(arguments: &[&str]) -> Command {
    let mut command = bench_memory(&["--batch-size", "4", "--host-memory", "0B"]);
    command.args(arguments);
    command
}

#[test]
fn more_devices_hold_larger_models_and_each_stays_within_its_memory() {
    let arguments =
        ["--memory-limit", "6MiB", "--family", "unet", "--channels", "2", "--stages", "1,2"];
    let (rows, _) = program::rows(on_devices(&arguments));
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
fn stages_at_home_hold_a_larger_model_in_the_memory_of_one_device() {
    let arguments = ["--memory-limit", "3MiB", "--host-memory", "4MiB", "--family", "unet"];
    let small = ["--channels", "2", "--stages", "1", "--batch-size", "1"];
    let (rows, _) = program::rows(bench_memory(&[&arguments[..], &small].concat()));
    let [_, pipeline, home] = &rows[..] else { panic!("{rows:?}") };
    assert_eq!([&pipeline["experiment"], &home["experiment"]], ["pipeline-1", "home-1"]);
    let bytes = |row: &serde_json::Value, key: &str| row[key].as_u64().expect("a number");
    assert!(bytes(home, "parameters") > bytes(pipeline, "parameters"), "{home}");
    assert!(bytes(home, "stages_at_home") > 0 && bytes(pipeline, "stages_at_home") == 0, "{home}");
    assert!(bytes(home, "peak_bytes") <= 3 << 20, "{home}");
    assert!(bytes(home, "host_bytes") <= 4 << 20, "{home}");
    assert!(["device", "host"].iter().any(|bound| home["bound"] == *bound), "{home}");
}

#[test]
fn an_experiment_without_a_model_that_fits_says_so_and_the_others_go_on() {
    let arguments = ["--memory-limit", "4MiB", "--family", "amoebanet", "--stages", "1"];
    on_devices(&arguments).assert().success().stdout(
        predicate::str::is_match("naive-1 +not even amoebanet:3x8 fits")
            .expect("a pattern")
            .and(predicate::str::is_match("pipeline-1 +amoebanet:").expect("a pattern")),
    );
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let refused = |arguments: &[&str], words: &str| {
        on_devices(arguments).assert().failure().stderr(predicate::str::contains(words));
    };
    let tiny = ["--memory-limit", "64KiB", "--family", "amoebanet", "--stages", "1"];
    refused(&tiny, "no model of any size fits 64.0 KiB: raise --memory-limit");
    refused(&["--stages", "0"], "give a whole number from 1 on");
    refused(&["--channels", "3", "--family", "unet"], "of which there are 3");
    refused(&["--device", "gpu"], "gpu");
}
