//! Training of an offloaded model from the command line.

use std::fs;
use std::path::Path;

use crate::program::{assert_alike, folder, like, lines, refused, run, run_in, stderr, text};
use predicates::prelude::*;
use serde_json::Value;

/// Less than the GPT's weights, gradients and AdamW's moments need.
const LIMIT: &str = "12MB";
const LIMIT_BYTES: u64 = 12_000_000;

/// The mlp has six layers, three of them with parameters.
const OFFLOADED: &str = "--offload all --num-micro-batches 4";

/// Arguments of most runs: a GPT of eight stages, seven of them alike, on a text in this folder.
fn gpt(folder: &Path) -> String {
    let text = text(folder);
    format!(
        "train --device cpu --model gpt --data {text} --sequence 32 --batch-size 8 --num-micro-batches 4"
    )
}

#[test]
fn a_model_on_the_host_learns_what_it_learns_on_the_device_where_that_has_too_little_memory() {
    let train = format!("{} --epochs 3 --json --clip-norm 1", gpt(&folder("offload-learns")));
    let on_the_device = lines(&format!("{train} --stages 1"));
    run(&format!("{train} --memory-limit {LIMIT} --offload none")).failure();
    let on_host = lines(&format!("{train} --memory-limit {LIMIT} --offload all"));
    assert_eq!(on_host.len(), 3);
    for (on_host, device) in on_host.iter().zip(&on_the_device) {
        for key in ["loss", "test_loss", "test_accuracy"] {
            let [on_host, device] =
                [on_host, device].map(|line| line[key].as_f64().expect("a number"));
            assert!((on_host - device).abs() < 1e-4, "{key}: {on_host} and {device}");
        }
        assert!(on_host["peak_bytes"].as_u64() <= Some(LIMIT_BYTES), "{on_host}");
    }
}

#[test]
fn a_run_goes_on_offloaded_and_back_on_the_device() {
    let folder = folder("offload-resume");
    let gpt = gpt(&folder);
    let train =
        |line: &str| run_in(&folder, &format!("{gpt} --dtype f64 --ema 0.9 {line}")).success();
    let on_host = "--offload all --memory-limit 24MB";
    train(&format!("--epochs 1 --save one {on_host}"));
    train(&format!("--epochs 2 --resume one --save offload {on_host}"));
    // In stages too: a whole model draws other random numbers for its dropout.
    let back = "--offload none --stages 1 --memory-limit 64MB";
    train(&format!("--epochs 2 --resume one --save device {back}"));
    assert_alike(folder.join("device"), folder.join("offload"));
    train(&format!("--epochs 3 --resume offload --save back {back}"));
}

#[test]
fn auto_leaves_on_the_device_what_fits_there_and_says_what_and_why() {
    let gpt = format!("{} --max-steps 2 --offload auto", gpt(&folder("offload-auto")));
    let within = |limit| run(&format!("{gpt} --memory-limit {limit}")).success();
    let stages = "in 8 stages of [1, 2, 1, 1, 1, 1, 1, 1] layers on cpu, breadth-first-8, ";
    let why = like(
        "breadth-first-8, [1-7] of 8 stages offloaded to the host \\(.*\\), [1-8] recomputed: the whole \
         model needs .*, and the device has 7.63 MiB",
    );
    within("8MB").stdout(predicate::str::contains(stages).and(why));
    within("64MB").stdout(predicate::str::contains("on the host").not());
}

#[test]
fn without_the_flag_a_model_that_does_not_fit_is_offloaded() {
    let gpt = format!("{} --max-steps 2", gpt(&folder("offload-unasked")));
    let said = |more: &str| run(&format!("{gpt} {more}")).success();
    let on_host = || predicate::str::contains("stages offloaded to the host");
    said(&format!("--memory-limit {LIMIT}")).stdout(on_host());
    said("--memory-limit 9MB --stages 2").stdout(on_host());
    // With enough memory or without a limit, nothing is measured or offloaded, with the flag or without.
    for more in ["--memory-limit 64MB", "--memory-limit 64MB --offload auto", "--stages 2", ""] {
        said(more).stdout(on_host().not()).stderr(predicate::str::contains("measur").not());
    }
}

#[test]
fn replicas_are_offloaded_if_one_does_not_fit_on_its_device() {
    let gpt = format!("{} --max-steps 2 --replicas 2", gpt(&folder("offload-replicas")));
    let within = |limit: &str| run(&format!("{gpt} --memory-limit {limit}"));
    within(LIMIT).success().stdout(predicate::str::contains("offloaded to the host"));
    within("64MB").success().stdout(predicate::str::contains("on the host").not());
}

#[test]
fn a_schedule_that_cannot_be_offloaded_stays_on_the_device() {
    let train = "train --model gpt --data synthetic --device cpu --max-steps 1 --num-micro-batches 8 --stages 1";
    let told = |more: &str| {
        let schedule = "--schedule interleaved-zero-bubble-3 --memory-limit 4MB";
        stderr(&run(&format!("{train} {schedule} {more}")).failure())
    };
    assert!(told("--offload all").contains("splits the backward"), "{}", told("--offload all"));
    assert_eq!(told(""), told("--offload none"));
}

/// The error is that of a run without a plan.
#[test]
fn what_fits_nowhere_is_reported_in_the_words_for_a_device() {
    let train = "train --device cpu --epochs 1 --memory-limit 100kB --micro-batch-size 8";
    // Compares the last line only, since planning prints what it measures first.
    let told = |more: &str| {
        let said = stderr(&run(&format!("{train} {more}")).code(3));
        said.lines().last().expect("a line").to_owned()
    };
    assert_eq!(told(""), told("--offload none"));
}

#[test]
fn what_is_partly_offloaded_learns_what_it_learns_elsewhere() {
    let train = format!("{} --epochs 2 --json", gpt(&folder("offload-partly")));
    let on_the_device = lines(&format!("{train} --stages 1"));
    let partly = lines(&format!("{train} --offload auto --memory-limit {LIMIT}"));
    for (partly, device) in partly.iter().zip(&on_the_device) {
        let [on_host, device] = [partly, device].map(|line| line["loss"].as_f64().expect("a loss"));
        assert!((on_host - device).abs() < 1e-4, "{on_host} and {device}");
        assert!(partly["peak_bytes"].as_u64() <= Some(LIMIT_BYTES), "{partly}");
    }
}

#[test]
fn a_model_that_fits_is_trained_as_without_the_flag() {
    let train = "train --device cpu --epochs 1 --json --memory-limit 32MB --micro-batch-size 32";
    let losses = |offload: &str| -> Vec<Value> {
        let told = lines(&format!("{train} --offload {offload}"));
        told.iter().map(|line| line["loss"].clone()).collect()
    };
    assert_eq!(losses("auto"), losses("none"));
}

#[test]
fn a_tied_gpt_lives_on_the_host_of_two_devices_and_tells_what_it_did() {
    let folder = folder("offload-gpt");
    let trace = folder.join("trace.json").display().to_string();
    let record = folder.join("run.json").display().to_string();
    let text = text(&folder);
    run(&format!(
        "train --model gpt --data {text} --device cpu --offload all --stages 2 --num-micro-batches 3 --max-steps 2 \
         --trace {trace} --record {record}"
    ))
    .success();
    let read = |path: &str| -> Value {
        serde_json::from_str(&fs::read_to_string(path).expect("a file")).expect("JSON")
    };
    let events = read(&trace)["traceEvents"].as_array().expect("events").clone();
    assert!(events.iter().any(|event| event["name"] == "0F0"), "{events:?}");
    let named = |name: &str| events.iter().filter(|event| event["name"] == name).count();
    let track = |event: &Value| event["args"]["name"] == "host link to device 1";
    assert!(events.iter().any(track), "{events:?}");
    // Each device's stage is fetched once for the forward and once for the backward, except the two still there when
    // the backward starts.
    assert!(named("fetch 0") == 2 && named("offload gradients 0") == 1, "{events:?}");
    assert!(named("waits for weights") > 0, "{events:?}");
    let settings = read(&record)["settings"].to_string();
    assert!(settings.contains("breadth-first-"), "{settings}");
    assert!(settings.contains("all"), "{settings}");
}

/// Transfers are not timed in a run that records nothing; the library tests that.
#[test]
fn a_report_of_a_run_has_a_lane_each_way_of_the_host_link() {
    let page = folder("offload-report").join("report.html");
    run(&format!("train --device cpu --epochs 1 {OFFLOADED} --report {}", page.display()))
        .success();
    let page = fs::read_to_string(&page).expect("a page");
    let start = page.find(r#"{"format""#).expect("the data");
    let data = page[start..].lines().next().expect("one line").trim_end_matches("</script>");
    let run: Value = serde_json::from_str(data).expect("JSON");
    let steps = run["timelines"].as_array().expect("steps");
    assert!(!steps.is_empty());
    for step in steps {
        let lane = &step["measured"]["lanes"][0];
        let count = |way: &str, kind: char| {
            lane[way]["kinds"].as_str().expect("letters").matches(kind).count()
        };
        // Three stages share two device buffers, in which a step may have left the first stage's weights. Four
        // micro-batches cross two boundaries; the first stage's inputs stay.
        assert!((3..=4).contains(&count("inward", 'f')), "{lane}");
        assert_eq!(count("outward", 'h'), 3, "{lane}");
        assert_eq!((count("outward", 'o'), count("outward", 'u')), (8, 8), "{lane}");
        assert_eq!(count("inward", 'd'), 8, "{lane}");
        let bytes = lane["inward"]["bytes"].as_array().expect("bytes");
        assert!(bytes.iter().all(|bytes| bytes.as_u64() > Some(0)), "{bytes:?}");
        assert!(count("awaited", 'w') > 0 && count("awaited", 'g') > 0, "{lane}");
    }
}

#[test]
fn what_cannot_be_is_one_clear_line() {
    for (flags, expected) in [
        ("--offload some", "[possible values: auto, none, all]"),
        (
            "--offload all --stages 4",
            "4 stages need as many layers with parameters, but the model has 3: lower --stages",
        ),
        (
            "--offload all --schedule breadth-first-4",
            "4 stages need as many layers with parameters",
        ),
        (
            "--offload all --schedule interleaved-zero-bubble-3",
            "splits the backward, which --offload all supports with at most 2 stages per device",
        ),
        (
            "--offload auto --schedule gpipe",
            "--schedule is for a pipeline: give --stages or --offload all too",
        ),
        ("--trace trace.json", "--trace is for a pipeline"),
    ] {
        refused(&format!("train {flags}"), 2, expected);
    }
}

/// With LoRA, whose base weights are frozen, a plan depends on what is trained. A part on the host may train where
/// neither place alone does.
#[test]
fn auto_trains_lora_wherever_either_place_does() {
    let folder = folder("offload-lora");
    let text = text(&folder);
    let tiny = "--model ../../examples/tiny-llama --from-scratch --lora 4";
    let trains = |offload: &str, limit: &str| {
        let line = format!(
            "train --device cpu {tiny} --data {text} --sequence 32 --batch-size 4 --max-steps 1 \
             --offload {offload} --memory-limit {limit}"
        );
        run(&line).get_output().status.success()
    };
    let limits = ["300kB", "400kB", "500kB", "600kB", "700kB", "900kB", "2MB"];
    let [device, host, auto] =
        ["none", "all", "auto"].map(|offload| limits.map(|limit| trains(offload, limit)));
    let either = device.iter().zip(&host).map(|(device, host)| *device || *host);
    assert!(auto.iter().zip(either).all(|(auto, either)| *auto >= either), "{auto:?}");
    assert!(device.contains(&false) && host != device, "{device:?}, {host:?}");
}
