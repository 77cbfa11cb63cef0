//! `brimful plan` as a user runs it.

#![allow(clippy::unwrap_used)]

use crate::program::{run, stderr, stdout};
use serde_json::Value;

fn answer(arguments: &str) -> String {
    stdout(&run(&format!("plan {arguments}")).success())
}

fn rows(arguments: &str) -> Value {
    let answer: Value = serde_json::from_str(&answer(&format!("{arguments} --json"))).unwrap();
    answer["rows"].clone()
}

fn refusal(arguments: &str) -> String {
    stderr(&run(&format!("plan {arguments}")).failure())
}

#[test]
fn compares_all_schedules() {
    insta::assert_snapshot!(answer("--stages 8 --num-micro-batches 24 --forward 1 --backward 2"));
}

#[test]
fn shows_one() {
    insta::assert_snapshot!(answer("-s 4 -m 8 --schedule 1f1b"));
}

#[test]
fn says_what_fits() {
    insta::assert_snapshot!(answer(
        "-s 4 -m 16 --activations 3GiB --parameters 2GiB --memory-limit 16GiB"
    ));
}

#[test]
fn plans_a_profile() {
    let arguments =
        "--profile tests/data/model.toml --batch-size 64 --stages 4 --memory-limit 600MiB";
    insta::assert_snapshot!(answer(arguments));
    let rows = rows(arguments);
    assert_eq!(rows[0]["fits"], true);
    assert!(rows.as_array().unwrap().len() > 90, "every alternative is there");
}

/// Weights with Adam's state exceed the GPU's memory: text and JSON say what each stage keeps.
#[test]
fn what_does_not_fit_on_the_gpu_lives_on_the_host() {
    let gpu = "--profile tests/data/model.toml --batch-size 64 --stages 1 --optimizer-bytes 2 \
                --num-micro-batches 8 --memory-limit 400MiB";
    // Without host memory nothing fits.
    refusal(gpu);
    let offloaded = format!("{gpu} --host-memory 4GiB --host-link 2GB,1GB");
    let shown = answer(&offloaded);
    assert!(shown.contains("on the host") && shown.contains("weights are on the host"), "{shown}");
    let best = &rows(&offloaded)[0];
    assert_eq!(best["fits"], true);
    assert!(best["host_bytes"].as_u64() > Some(0), "{best}");
    let stages = best["stages"].as_array().unwrap();
    assert_eq!(stages.len(), best["balance"].as_array().unwrap().len());
    let locations: Vec<_> = stages.iter().map(|stage| stage["weights"].as_str().unwrap()).collect();
    assert!(locations.contains(&"host") && locations.contains(&"device"), "{locations:?}");
    for stage in stages {
        assert!(stage["layers"].as_array().is_some_and(|layers| !layers.is_empty()), "{stage}");
        assert!(stage["recompute"].is_string() && stage["boundaries"].is_string(), "{stage}");
    }
    insta::assert_snapshot!(refusal(&format!("{gpu} --host-memory 4GiB")), @"brimful: --host-memory with --profile needs --host-link too");
    insta::assert_snapshot!(refusal(&format!("{gpu} --host-link 0B")), @"brimful: --host-link has a rate above 0 to the device, and one back where that differs");
}

/// Bytes a parameter are those of the optimizer's format, with gradients only if they are kept.
#[test]
fn says_how_large_a_model_may_be_and_what_hides_its_transfers() {
    let gpt = "--model gpt --batch-size 8 --stages 1 --num-micro-batches 2 --schedule gpipe \
               --host-memory 1GiB --host-link 1GB --dtype bf16 --optimizer adamw";
    let offload = |more: &str| {
        let json: Value = serde_json::from_str(&answer(&format!("{gpt} {more} --json"))).unwrap();
        json["offload"].clone()
    };
    for (more, bytes) in [
        ("", 16.0),
        ("--update-in-backward", 12.0),
        ("--optimizer-state 8bit --update-in-backward", 6.0625),
    ] {
        let figures = offload(more);
        assert_eq!(figures["bytes_per_parameter"], bytes, "{more}: {figures}");
        let most = (f64::from(1 << 30) / bytes) as u64;
        assert_eq!(figures["most_parameters"], most, "{more}: {figures}");
        let [samples, tokens] =
            ["samples", "tokens"].map(|unit| figures[format!("hidden_from_{unit}")].as_u64());
        assert!(samples > Some(0) && tokens > samples, "{figures}");
    }
    let shown = answer(&format!("{gpt} --update-in-backward"));
    assert!(shown.contains("A parameter takes 12.00 bytes: 1.00 GiB of host memory"), "{shown}");
    assert!(shown.contains("hidden from"), "{shown}");
    let refused = refusal(&format!("{gpt} --optimizer adafactor --optimizer-state 8bit"));
    assert!(refused.contains("cannot be used multiple times"), "{refused}");
    let plain =
        "--model mlp --batch-size 8 --stages 1 --optimizer adafactor --optimizer-state 8bit";
    assert!(refusal(plain).contains("adafactor keeps rows and columns alone"));
}

#[test]
fn plans_a_model_that_it_measures() {
    for (model, layers) in [("mlp", 6), ("gpt", 9)] {
        let best =
            &rows(&format!("--model {model} --batch-size 32 --stages 2 --memory-limit 1GiB"))[0];
        let balance = best["balance"].as_array().unwrap();
        let sum: u64 = balance.iter().filter_map(Value::as_u64).sum();
        assert_eq!((sum, &best["fits"]), (layers, &true.into()), "{best}");
        assert!(best["makespan"].as_f64() > Some(0.0), "{best}");
        let peaks = best["peak_bytes"].as_array().unwrap();
        assert!(peaks.iter().all(|peak| peak.as_u64() > Some(100_000)), "{best}");
    }
}

#[test]
fn a_model_that_cannot_be_measured_is_refused() {
    let refused = refusal("--model mlp --batch-size 8 -s 9");
    let last = refused.lines().last().unwrap();
    insta::assert_snapshot!(last, @"brimful: 9 stages need as many layers, but the model has 6: lower --stages");
    let refused = refusal("--model mlp --batch-size 8 -s 2 --device gpu");
    assert!(
        refused.starts_with("brimful: there is no device 'gpu' here; there is cpu"),
        "{refused}"
    );
    insta::assert_snapshot!(refusal("--model mlp --batch-size 0 -s 2"), @"
    error: invalid value '0' for '--batch-size <N>': give a whole number from 1 on

    For more information, try '--help'.
    ");
    let refused = refusal("--model mlp -s 2");
    assert!(refused.contains("--batch-size <N>"), "{refused}");
    let refused = refusal("--model mlp --batch-size 8 -s 2 --forward 3");
    assert!(refused.contains("cannot be used with '--forward"), "{refused}");
}

#[test]
fn runs_a_file() {
    insta::assert_snapshot!(answer("--schedule-file tests/data/mine.csv"));
}

#[test]
fn refuses_with_the_fix() {
    insta::assert_snapshot!(refusal("--schedule-file tests/data/deadlock.csv"), @"brimful: tests/data/deadlock.csv cannot be run: deadlock: device 0 waits in 0B0 for stage 1, device 1 waits in 1F1 for stage 0 (--verbose shows the rest)");
    insta::assert_snapshot!(refusal("-s 0 -m 4"), @"
    error: invalid value '0' for '--stages <S>': give a whole number from 1 on

    For more information, try '--help'.
    ");
    insta::assert_snapshot!(refusal("-s 4 -m 4 --schedule pipedream"), @"
    error: invalid value 'pipedream' for '--schedule <NAME,…>': no schedule is called 'pipedream': choose gpipe, 1f1b, interleaved, breadth-first, zero-bubble-h1, interleaved-zero-bubble, zero-bubble-v or auto (interleaved-4 for 4 stages on each device)

    For more information, try '--help'.
    ");
    insta::assert_snapshot!(refusal("-s 4 -m 4 --backward -1"), @"
    error: invalid value '-1' for '--backward <TIME>': give a number from 0 on

    For more information, try '--help'.
    ");
    insta::assert_snapshot!(refusal("-s 4 -m 4 --memory-limit 16Gigs"), @"
    error: invalid value '16Gigs' for '--memory-limit <BYTES>': '16Gigs' is not a number of bytes: write a number and a unit, such as 96MiB or 16 GB; units are B, KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB or in short K, M, G, T (powers of 1024)

    For more information, try '--help'.
    ");
    insta::assert_snapshot!(refusal("--profile tests/data/mine.csv --batch-size 8 -s 2"), @"brimful: tests/data/mine.csv is not a profile: line 2: key with no value, expected `=`");
    insta::assert_snapshot!(refusal("--profile tests/data/model.toml --batch-size 8 -s 50"), @"brimful: 50 stages need as many layers, but the model has 18: lower --stages");
}

#[test]
fn a_folder_s_model_is_measured_and_planned() {
    let plan = "plan --model ../../examples/tiny-llama --batch-size 8 --stages 2 --schedule 1f1b";
    let run = run(&format!("{plan} -m 2 --json")).success();
    let said: Value = serde_json::from_str(&stdout(&run)).expect("JSON");
    assert_eq!(said["rows"][0]["schedule"], "1f1b", "{said}");
    run.stderr(predicates::str::contains("measuring time and memory of "));
}
