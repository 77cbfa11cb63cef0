//! Training from the command line: limits, saving, and refusals.

use std::fs;

use crate::program::{
    assert_alike, complains, folder, lines, refused, run, run_in, saved, train_in,
};
use predicates::prelude::*;
use serde_json::Value;

#[test]
fn an_mlp_learns_digits_inside_its_limit_and_says_so_in_json() {
    let lines = lines(
        "train --batch-size all --micro-batch-size 64 --memory-limit 8MiB --epochs 20 --learning-rate 0.005 \
         --json --device cpu",
    );
    assert_eq!(lines.len(), 20);
    let last = &lines[19];
    assert_eq!((&last["done"], &lines[18]["done"]), (&Value::Bool(true), &Value::Bool(false)));
    assert!(last["test_accuracy"].as_f64() > Some(0.95), "{last}");
    assert!(last["peak_bytes"].as_u64() < Some(8 << 20), "{last}");
    assert_eq!((&last["micro_batch_size"], &last["retries"]), (&64.into(), &0.into()));
    for key in ["loss", "samples_per_s"] {
        assert!(last[key].as_f64() > Some(0.0), "{key}");
    }
}

#[test]
fn replicas_learn_digits_in_a_memory_of_their_own_each() {
    let train = "train --replicas 2 --epochs 4 --json --device cpu";
    let lines = lines(&format!("{train} --memory-limit 4MiB"));
    let last = &lines[3];
    assert!(last["test_accuracy"].as_f64() > Some(0.9), "{last}");
    assert!(last["peak_bytes"].as_u64().is_some_and(|peak| peak < 4 << 20), "{last}");
    let smaller = format!("{train} --memory-limit 1MiB --micro-batch-size 8");
    refused(&smaller, 3, "out of memory in arena 'device 0'");
}

#[test]
fn a_stage_that_is_too_small_is_named_with_the_remedy() {
    let arguments =
        "train --stages 2 --num-micro-batches 2 --memory-limit 1MiB --offload none --device cpu";
    // The planner's warning comes first.
    refused(arguments, 3, "; needed: ").stderr(
        predicate::str::starts_with("brimful: warning: no balance fits by plan")
            .and(predicate::str::contains("\nbrimful: stage "))
            .and(predicate::str::ends_with("; try --num-micro-batches 4\n"))
            .and(predicate::str::contains("out of memory in arena 'device").count(1))
            .and(predicate::function(|text: &str| text.lines().count() == 2)),
    );
}

#[test]
fn the_micro_batch_size_does_not_change_what_is_learnt() {
    let loss = |micro: usize| {
        let train = format!("train --epochs 2 --dtype f64 --json --micro-batch-size {micro}");
        lines(&train)[1]["loss"].as_f64().expect("a loss")
    };
    assert!((loss(128) - loss(7)).abs() < 1e-9);
}

/// A step with learning rate 0 saves the run's initial weights.
#[test]
fn one_seed_begins_with_the_same_weights_whole_and_in_stages() {
    let folder = folder("first-weights");
    let text = crate::program::text(&folder);
    let begun = |model: &str, seed: &str, more: &str| {
        let still = "--optimizer sgd --learning-rate 0 --max-steps 1 --num-micro-batches 2 --save run --overwrite";
        let data = if model == "gpt" { &text } else { "digits" };
        let of = format!("--model {model} --data {data} --seed {seed}");
        train_in(&folder, &format!("{of} {still} {more}")).success();
        let (mut tensors, _) = saved(folder.join("run"));
        tensors.retain(|(name, _)| !name.starts_with("optimizer.") && !name.contains("running_"));
        tensors
    };
    for model in ["mlp", "gpt"] {
        let whole = begun(model, "1", "");
        for more in ["--stages 2", "--stages 2 --offload all", "--replicas 2"] {
            assert_eq!(begun(model, "1", more), whole, "{model} {more}");
        }
        assert_ne!(begun(model, "2", ""), whole, "{model} of another seed");
    }
}

const STAGES: &str =
    "--stages 2 --schedule interleaved-2 --recompute except-last --num-micro-batches 5";

#[test]
fn a_model_in_stages_learns_digits_and_tells_what_it_did() {
    let trace = folder("stages").join("trace.json");
    let lines = lines(&format!(
        "train --epochs 4 --json --device cpu {STAGES} --memory-limit 8MiB --trace {}",
        trace.display()
    ));
    let last = &lines[3];
    assert!(last["test_accuracy"].as_f64() > Some(0.9), "{last}");
    assert!(last["peak_bytes"].as_u64().is_some_and(|peak| peak < 8 << 20), "{last}");
    assert_eq!((&last["micro_batch_size"], &last["done"]), (&26.into(), &true.into()));
    let trace: Value =
        serde_json::from_str(&fs::read_to_string(trace).expect("a trace")).expect("JSON");
    let names = trace["traceEvents"].as_array().expect("events").iter().map(|e| &e["name"]);
    let names: Vec<_> = names.filter_map(Value::as_str).collect();
    for name in ["0F0", "3B4", "2R1"] {
        assert!(names.contains(&name), "{name} is not in {names:?}");
    }
}

/// However a run is cut and saved, it is the same run.
#[test]
fn stages_replicas_and_one_device_go_on_from_each_others_files() {
    let folder = folder("both");
    let train = |line: &str| run_in(&folder, &format!("train --dtype f64 {line}")).success();
    train("--epochs 1 --save one");
    train("--epochs 2 --resume one --save plain");
    train(&format!("--epochs 2 --resume one --save staged {STAGES}"));
    train("--epochs 2 --resume one --save replicated --replicas 3 --micro-batch-size 20");
    let (_, told) = saved(folder.join("plain"));
    for other in ["staged", "replicated"] {
        let (_, mut told_too) = saved(folder.join(other));
        // The flags that cut it differ.
        told_too.insert("flags".into(), told["flags"].clone());
        let loss = told_too.insert("best-test-loss".into(), told["best-test-loss"].clone());
        assert_eq!(told, told_too);
        let losses = [Some(told["best-test-loss"].clone()), loss]
            .map(|text| text.expect("a loss").parse::<f64>().expect("a number"));
        assert!((losses[0] - losses[1]).abs() < 1e-9, "{losses:?}");
        assert_alike(folder.join("plain"), folder.join(other));
        train(&format!("--epochs 3 --resume {other} --save back --overwrite"));
    }
}

#[test]
fn a_run_goes_on_with_its_learning_rate_or_another() {
    let folder = folder("rate");
    let train = |to: &str, line: &str| {
        run_in(&folder, &format!("train {line} --save {to}")).success();
        let (mut tensors, _) = saved(folder.join(to));
        tensors.retain(|(name, _)| !name.starts_with("optimizer."));
        tensors
    };
    let still = train("still", "--epochs 1 --learning-rate 0");
    assert_eq!(train("still-too", "--epochs 2 --resume still"), still);
    let moved = train("moved", "--epochs 2 --resume still --learning-rate 0.01");
    assert_ne!(moved, still);
    assert_eq!(train("halted", "--epochs 3 --resume moved --learning-rate 0"), moved);
}

#[test]
fn files_that_do_not_fit_are_refused_with_the_reason() {
    let save = folder("refused").join("mlp.safetensors").display().to_string();
    run(&format!("train --epochs 1 --save {save}")).success();
    for (resume, expected) in [
        (&*format!("{save} --learning-rate-decay linear"), "decay none"),
        (&format!("{save} --seed 1"), "was made with --seed 0, but this run has --seed 1"),
        (&format!("{save} --model resnet18"), "--model mlp"),
        (
            // The error shows the value as on the command line.
            &format!("{save} --batch-size 64"),
            "it was made with --batch-size 128, but this run has --batch-size 64",
        ),
        ("/tmp", "it is a folder without brimful_run.safetensors: name a file of --save"),
        (
            &format!("{save} --seed 1 --batch-size 64 --optimizer sgd"),
            "it was made with --batch-size 128, --optimizer adamw, --seed 0, but this run has --batch-size 64, \
             --optimizer sgd, --seed 1: pass --batch-size 128 --optimizer adamw --seed 0 again",
        ),
        ("/proc/version", "/proc/version"),
    ] {
        complains(&format!("train --resume {resume}"), 1, expected);
    }
}

#[test]
fn nonsense_on_the_command_line_is_one_clear_error() {
    for (flags, expected) in [
        ("--report /no/folder/report.html", "there is no folder /no/folder"),
        ("--stages 0", "give a whole number from 1 on"),
        ("--stages 9", "9 stages need as many layers, but the model has 6"),
        ("--stages 4 --schedule interleaved-2", "8 stages need as many layers"),
        ("--schedule gpipe", "give --stages or --offload all too"),
        ("--num-micro-batches 2 --micro-batch-size 2", "cannot be used with"),
        ("--micro-batch-size 0", "from 1 on, auto or largest"),
        ("--batch-size 0", "give a number from 1 on, or all"),
        ("--memory-limit much", "such as 96MiB"),
        ("--memory-limit 0 --device cpu", "limit of 0 bytes"),
    ] {
        refused(&format!("train {flags}"), 2, expected);
    }
}

#[test]
fn verify_finds_full_and_split_the_same() {
    for model in ["mlp", "gpt", "resnet18"] {
        let report =
            &lines(&format!("verify --model {model} --batch-size 5 --micro-batch-size 2 --json"))
                [0];
        assert!(report["max_relative_error"].as_f64() < Some(1e-10), "{report}");
        assert!(report["parameter"].as_str().is_some_and(|name| name.contains('.')), "{report}");
        assert_eq!(report["sizes"], serde_json::json!([2, 2, 1]));
    }
    run("verify").success().stdout(predicate::str::contains("equal up to rounding"));
}

#[test]
fn with_exact_batch_norms_verify_finds_them_the_same_in_training_mode() {
    let verify = "verify --model resnet18 --batch-size 5 --micro-batch-size 2 --tolerance 1e-10";
    let verify = |statistics: &str| run(&format!("{verify} --batch-norm {statistics}"));
    verify("exact").success().stdout(predicate::str::contains("[2, 2, 1]"));
    verify("deferred").failure().stdout(predicate::str::contains("NOT equal"));
    refused("verify --batch-norm exact", 2, "--batch-norm is for resnet18");
}

#[test]
fn a_residual_network_trains_with_exact_batch_norms_on_one_device() {
    let train = "train --model resnet18 --batch-size 16 --micro-batch-size 4 --max-steps 2 --device cpu \
                 --batch-norm exact";
    run(train).success();
    refused(&format!("{train} --stages 2"), 2, "--batch-norm exact is for one device");
}
