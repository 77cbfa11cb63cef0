//! Training a model that lives on the host, from the command line.

mod program;

use std::fs;

use brimful::save;
use predicates::prelude::*;
use program::{brimful, folder, lines, text};
use serde_json::Value;

/// Weights, gradients and AdamW's moments of the mlp take more.
const LIMIT: &str = "2600kB";

/// The mlp has three layers with parameters, of six.
const AT_HOME: [&str; 4] = ["--offload", "all", "--micro-batches", "4"];
const IN_ONE_STAGE: [&str; 4] = ["--stages", "1", "--micro-batches", "4"];

#[test]
fn a_model_on_the_host_learns_what_it_learns_on_the_device_where_that_has_no_room() {
    let train = ["train", "--device", "cpu", "--epochs", "3", "--json", "--clip-norm", "1"];
    let with_room = lines(&[&train[..], &IN_ONE_STAGE].concat());
    let limited = [&train[..], &["--memory-limit", LIMIT]].concat();
    let on_the_device = ["--micro-batches", "4", "--offload", "none"];
    brimful().args([&limited[..], &on_the_device].concat()).assert().failure();
    let at_home = lines(&[&limited[..], &AT_HOME].concat());
    assert_eq!(at_home.len(), 3);
    for (home, device) in at_home.iter().zip(&with_room) {
        for key in ["loss", "test_loss", "test_accuracy"] {
            let [home, device] = [home, device].map(|line| line[key].as_f64().expect("a number"));
            assert!((home - device).abs() < 1e-4, "{key}: {home} and {device}");
        }
        assert!(home["peak_bytes"].as_u64() <= Some(2_600_000), "{home}");
    }
}

#[test]
fn a_run_goes_on_at_home_and_back_on_the_device() {
    let folder = folder("offload-resume");
    let path = |name: &str| folder.join(name).to_str().expect("a path").to_owned();
    let train = |epochs: &str, from: Option<&str>, to: &str, more: &[&str]| {
        let mut run = brimful();
        run.args(["train", "--dtype", "f64", "--epochs", epochs, "--save", &path(to)]);
        run.args(["--device", "cpu", "--ema", "0.9"]);
        run.args(from.iter().flat_map(|from| ["--resume".to_owned(), path(from)])).args(more);
        run.assert().success();
    };
    let at_home = [&AT_HOME[..], &["--memory-limit", "5200kB"]].concat();
    train("1", None, "one", &at_home);
    train("2", Some("one"), "home", &at_home);
    train("2", Some("one"), "device", &["--micro-batches", "4"]);
    let (home, device) = (save::read(path("home")), save::read(path("device")));
    let (home, device) = (home.expect("home").0, device.expect("device").0);
    assert_eq!(home.len(), device.len());
    for ((name, expected), (name_too, got)) in device.iter().zip(&home) {
        assert_eq!(name, name_too);
        assert!(got.allclose(expected, 1e-9, 1e-9, false), "{name} differs");
    }
    train("3", Some("home"), "back", &[]);
}

/// The mlp's first layer has most of its parameters: within the limit, one of the others stays.
#[test]
fn auto_leaves_on_the_device_what_fits_there_and_says_what_and_why() {
    let run = |limit: &str| {
        let mut run = brimful();
        run.args(["train", "--device", "cpu", "--epochs", "1", "--micro-batches", "4"]);
        run.args(["--offload", "auto", "--memory-limit", limit]);
        run.assert().success()
    };
    let stages = "in 3 stages of [3, 2, 1] layers on cpu, breadth-first-3, ";
    let why = predicate::str::is_match(
        "breadth-first-3, [12] of 3 stages at home on the host \\(.*\\), [1-3] computed again: all on the device \
         would take .* of its 2.48 MiB",
    );
    run(LIMIT).stdout(predicate::str::contains(stages).and(why.expect("a pattern")));
    run("32MB").stdout(predicate::str::contains("at home").not());
}

/// What a line says of where stages live.
const AT_HOME_ON_THE_HOST: &str = "stages at home on the host";

#[test]
fn who_names_a_limit_or_stages_has_what_does_not_fit_on_the_host() {
    let said = |more: &[&str]| {
        let mut run = brimful();
        run.args(["train", "--device", "cpu", "--epochs", "1", "--micro-batches", "4"]).args(more);
        run.assert().success()
    };
    let at_home = || predicate::str::contains(AT_HOME_ON_THE_HOST);
    said(&["--memory-limit", LIMIT]).stdout(at_home());
    said(&["--memory-limit", "2300kB", "--stages", "2"]).stdout(at_home());
    // Where there is room for it, or nothing is said of room, nothing is measured and all is as it was.
    for more in [&["--memory-limit", "32MB"][..], &["--stages", "2"], &[]] {
        said(more).stdout(at_home().not()).stderr(predicate::str::contains("measured").not());
    }
}

#[test]
fn where_homes_cannot_be_planned_by_stage_nothing_goes_to_the_host_unasked() {
    let cases = ["--stages 2 --schedule gpipe", "--replicas 2"];
    for more in cases {
        let run = |limit: &str| {
            let mut run = brimful();
            run.args(["train", "--device", "cpu", "--epochs", "1", "--micro-batches", "4"]);
            run.args(["--memory-limit", limit]).args(more.split(' '));
            run.assert()
        };
        run("1500kB").code(3);
        run("8MB").success().stdout(predicate::str::contains("at home").not());
    }
}

/// As it would be without a plan.
#[test]
fn what_fits_nowhere_is_told_in_the_words_for_a_device() {
    let train = "train --device cpu --epochs 1 --memory-limit 100kB --micro-batch 8";
    let run = |more: &[&str]| {
        let run = brimful().args(train.split(' ')).args(more).assert().code(3);
        String::from_utf8_lossy(&run.get_output().stderr).into_owned()
    };
    assert_eq!(run(&[]), run(&["--offload", "none"]));
}

#[test]
fn what_is_partly_at_home_learns_what_it_learns_elsewhere() {
    let train = ["train", "--device", "cpu", "--epochs", "2", "--json", "--micro-batches", "4"];
    let with_room = lines(&[&train[..], &["--stages", "1"]].concat());
    let planned = ["--offload", "auto", "--memory-limit", LIMIT];
    let partly = lines(&[&train[..], &planned].concat());
    for (partly, device) in partly.iter().zip(&with_room) {
        let [home, device] = [partly, device].map(|line| line["loss"].as_f64().expect("a loss"));
        assert!((home - device).abs() < 1e-4, "{home} and {device}");
        assert!(partly["peak_bytes"].as_u64() <= Some(2_600_000), "{partly}");
    }
}

#[test]
fn a_model_that_fits_is_trained_as_without_the_flag() {
    let train = ["train", "--device", "cpu", "--epochs", "1", "--json", "--memory-limit", "32MB"];
    let losses = |more: &[&str]| -> Vec<Value> {
        let told = lines(&[&train[..], &["--micro-batch", "32"], more].concat());
        told.iter().map(|line| line["loss"].clone()).collect()
    };
    assert_eq!(losses(&["--offload", "auto"]), losses(&["--offload", "none"]));
}

#[test]
fn a_tied_gpt_lives_on_the_host_of_two_devices_and_tells_what_it_did() {
    let folder = folder("offload-gpt");
    let trace = folder.join("trace.json").display().to_string();
    let record = folder.join("run.json").display().to_string();
    let text = text(&folder);
    let mut run = vec!["train", "--model", "gpt", "--data", &text, "--device", "cpu"];
    run.extend(["--offload", "all", "--stages", "2", "--micro-batches", "3", "--max-steps", "2"]);
    run.extend(["--trace", &trace, "--record", &record]);
    brimful().args(&run).assert().success();
    let read = |path: &str| -> Value {
        serde_json::from_str(&fs::read_to_string(path).expect("a file")).expect("JSON")
    };
    let events = read(&trace)["traceEvents"].as_array().expect("events").clone();
    assert!(events.iter().any(|event| event["name"] == "0F0"), "{events:?}");
    let named = |name: &str| events.iter().filter(|event| event["name"] == name).count();
    let track = |event: &Value| event["args"]["name"] == "bus to device 1";
    assert!(events.iter().any(track), "{events:?}");
    // Of each device once forward and once back, but for the two that are there at the turn.
    assert!(named("fetch 0") == 2 && named("gradients home 0") == 1, "{events:?}");
    assert!(named("waits for weights") > 0, "{events:?}");
    let settings = read(&record)["settings"].to_string();
    assert!(settings.contains("breadth-first-"), "{settings}");
    assert!(settings.contains("all"), "{settings}");
}

/// The bus of a run that nobody looks at is not timed: that is the library's test.
#[test]
fn a_report_of_a_run_has_a_lane_each_way_of_the_bus() {
    let folder = folder("offload-report");
    let page = folder.join("report.html");
    let mut run = brimful();
    run.args(["train", "--device", "cpu", "--epochs", "1"]).args(AT_HOME);
    run.arg("--report").arg(&page).assert().success();
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
        // Three stages in two slots, and four micro-batches at two boundaries; the first stage's inputs stay.
        assert_eq!((count("inward", 'f'), count("outward", 'h')), (4, 3), "{lane}");
        assert_eq!((count("outward", 'o'), count("outward", 'u')), (8, 8), "{lane}");
        assert_eq!(count("inward", 'd'), 8, "{lane}");
        let bytes = lane["inward"]["bytes"].as_array().expect("bytes");
        assert!(bytes.iter().all(|bytes| bytes.as_u64() > Some(0)), "{bytes:?}");
        assert!(count("awaited", 'w') > 0 && count("awaited", 'g') > 0, "{lane}");
    }
}

#[test]
fn what_cannot_be_is_one_clear_line() {
    let cases: [(&[&str], &str); 6] = [
        (&["--offload", "some"], "[possible values: auto, none, all]"),
        (
            &["--offload", "all", "--stages", "4"],
            "4 stages need as many layers with parameters, but the model has 3: lower --stages",
        ),
        (
            &["--offload", "all", "--schedule", "breadth-first-4"],
            "4 stages need as many layers with parameters",
        ),
        (
            &["--offload", "all", "--schedule", "interleaved-zero-bubble-3"],
            "splits backwards, for which 2 stages of a model on the host are the most",
        ),
        (
            &["--offload", "auto", "--schedule", "gpipe"],
            "--schedule is for a model in stages: give --stages <S> or --offload all too",
        ),
        (&["--trace", "trace.json"], "--trace is for a model in stages"),
    ];
    for (arguments, expected) in cases {
        let said = predicate::str::contains(expected);
        brimful().arg("train").args(arguments).assert().code(2).stderr(said);
    }
}
