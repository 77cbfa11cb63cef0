//! Features of longer runs: initial weights, tests and saves at given steps, early stopping, and files that do not
//! depend on how often the run was killed.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::thread::sleep;
use std::time::Duration;

use crate::program::{folder, names, saved, start_in, train_in as train};
use predicates::prelude::*;
use serde_json::Value;
use tch::Tensor;

fn json_lines(folder: &Path, line: &str) -> Vec<Value> {
    crate::program::json_lines(&train(folder, &format!("{line} --json")).success())
}

/// Returns the model of a saved run.
fn model(path: &Path) -> BTreeMap<String, Tensor> {
    let (tensors, _) = saved(path);
    tensors.into_iter().filter(|(name, _)| !name.starts_with("optimizer.")).collect()
}

fn distance(one: &Path, other: &Path) -> f64 {
    let (one, other) = (model(one), model(other));
    assert_eq!(one.len(), other.len());
    let far =
        |(name, tensor): (&String, &Tensor)| (tensor - &other[name]).abs().max().double_value(&[]);
    one.iter().map(far).fold(0.0, f64::max)
}

#[test]
fn a_run_tests_by_the_step_and_ends_with_its_last_one() {
    let folder = folder("by-the-step");
    let lines = json_lines(&folder, "--batch-size 64 --max-steps 30 --eval-every 20");
    // An epoch has 23 steps: a test after 20, one at the end of the epoch, and a last one after 30.
    let steps: Vec<_> = lines.iter().map(|line| line["step"].as_u64()).collect();
    assert_eq!(steps, [Some(20), None, Some(30)]);
    assert_eq!(lines[1]["epoch"], 1);
    let done: Vec<_> = lines.iter().map(|line| line["done"] == true).collect();
    assert_eq!(done, [false, false, true]);
}

#[test]
fn a_run_that_gets_no_better_stops_early() {
    let folder = folder("no-better");
    let lines =
        json_lines(&folder, "--learning-rate 0 --micro-batch-size 64 --epochs 9 --stop-after 2");
    assert_eq!(lines.len(), 3, "the best, and two that are no better");
    assert_eq!(lines[2]["done"], true);
}

#[test]
fn mini_batches_that_are_added_up_are_one() {
    let folder = folder("added-up");
    train(&folder, "--data synthetic --max-steps 1 --save first").success();
    let line = "--data synthetic --epochs 1 --micro-batch-size 8 --optimizer sgd --init first";
    train(&folder, &format!("{line} --batch-size 64 --save whole")).success();
    for (stages, name) in [("", "parts"), ("--stages 2", "stages")] {
        let line = format!("{line} --batch-size 16 --accumulate 4 {stages} --save {name}");
        train(&folder, &line).success();
        let far = distance(&folder.join("whole"), &folder.join(name));
        assert!(far < 1e-5, "{name}: {far}");
    }
}

#[test]
fn a_gradient_is_shortened_in_whole_models_and_in_pipelines() {
    let folder = folder("shortened");
    train(&folder, "--max-steps 2 --learning-rate 0 --save first").success();
    let line = "--max-steps 2 --optimizer sgd --momentum 0 --learning-rate 1 --micro-batch-size 32 \
                --clip-norm 0.001 --init first";
    train(&folder, &format!("{line} --save one")).success();
    train(&folder, &format!("{line} --stages 2 --save two")).success();
    let moved = distance(&folder.join("first"), &folder.join("one"));
    assert!(moved > 0.0 && moved <= 0.002, "{moved}");
    let far = distance(&folder.join("one"), &folder.join("two"));
    assert!(far < 1e-6, "{far}");
}

#[test]
fn weights_of_a_file_are_what_a_run_begins_with() {
    let folder = folder("begun");
    train(&folder, "--max-steps 3 --save a.safetensors").success();
    train(&folder, "--max-steps 1 --learning-rate 0 --seed 5 --init a.safetensors --save b")
        .success();
    assert_eq!(distance(&folder.join("a.safetensors"), &folder.join("b")), 0.0);
    let line = "--model resnet18 --max-steps 1 --init a.safetensors";
    train(&folder, line).code(2).stderr(
        predicate::str::starts_with("brimful: --init a.safetensors: it lacks ")
            .and(predicate::str::contains("--init-partial")),
    );
    train(&folder, &format!("{line} --init-partial"))
        .code(2)
        .stderr(predicate::str::contains("none of its weights fit the model"));
    train(&folder, "--init a.safetensors --resume a.safetensors").code(2);
}

#[test]
fn the_best_and_the_newest_files_are_kept() {
    let folder = folder("kept");
    let line = "--batch-size 64 --max-steps 40 --eval-every 10 --save-every 10";
    train(&folder, &format!("{line} --keep 2 --save n.safetensors")).success();
    train(&folder, &format!("{line} --keep best --save b.safetensors")).success();
    let expected = [
        "b.best.safetensors",
        "b.safetensors",
        "n.safetensors",
        "n.step-30.safetensors",
        "n.step-40.safetensors",
    ];
    assert_eq!(names(&folder), expected);
    let [last, best] =
        ["b", "b.best"].map(|name| saved(folder.join(format!("{name}.safetensors"))).1);
    assert_eq!(last["best-step"], best["best-step"]);
    train(&folder, "--keep best").code(2).stderr(predicate::str::contains("--save"));
}

#[test]
fn a_run_goes_on_with_its_own_flags_and_those_that_are_given_besides() {
    let folder = folder("told");
    let line =
        "--batch-size 64 --clip-norm 1 --learning-rate 0.01 --micro-batch-size 32 --log log.csv";
    train(&folder, &format!("{line} --max-steps 4 --keep best --save whole")).success();
    train(&folder, &format!("{line} --max-steps 2 --keep best --save a")).code(2);
    fs::remove_file(folder.join("log.csv")).expect("removed");
    train(&folder, &format!("{line} --max-steps 2 --keep best --save a")).success();
    // Without more steps, nothing is left to do.
    train(&folder, "--resume a").success().stderr(predicate::str::contains("nothing to do"));
    train(&folder, "--resume a --max-steps 4").success();
    assert_eq!(saved(folder.join("a")), saved(folder.join("whole")));
    assert_eq!(saved(folder.join("a.best")), saved(folder.join("whole.best")));
    let log = fs::read_to_string(folder.join("log.csv")).expect("a log");
    assert_eq!(log.lines().filter(|line| !line.contains(",,,,")).count(), 5, "{log}");
    // The best file belongs to the same run, which continues to save at its own path.
    train(&folder, "--resume a.best --max-steps 5").success();
    assert_eq!(names(&folder), ["a", "a.best", "log.csv", "whole", "whole.best"]);
    let words = "it was made with --clip-norm 1, no --ema, but this run has --clip-norm 2, --ema 0.9: pass \
                 --clip-norm 1 again and leave --ema out";
    train(&folder, "--resume a --clip-norm 2 --ema 0.9")
        .code(1)
        .stderr(predicate::str::contains(words));
    let other = "it was made with no --batch-norm, but this run has --batch-norm frozen: \
                 leave --batch-norm out";
    train(&folder, "--model resnet18 --batch-size 16 --max-steps 1 --save r").success();
    train(&folder, "--resume r --max-steps 2 --batch-norm frozen")
        .code(1)
        .stderr(predicate::str::contains(other));
}

#[test]
fn data_that_were_moved_are_the_same_and_others_are_not() {
    let folder = folder("moved");
    crate::program::text(&folder);
    let line = "--model gpt --data text --batch-size 4 --micro-batch-size 4 --sequence 16";
    train(&folder, &format!("{line} --max-steps 1 --save a")).success();
    fs::rename(folder.join("text"), folder.join("moved")).expect("moved");
    fs::write(folder.join("other"), "Another text altogether. ".repeat(200)).expect("written");
    train(&folder, "--resume a --max-steps 2 --data other").code(1).stderr(
        predicate::str::contains(
            "it was made with --data text, but this run has --data other: pass --data text again",
        ),
    );
    train(&folder, "--resume a --max-steps 2 --data moved").success();
}

#[test]
fn data_that_have_changed_are_refused_within_an_epoch_and_named_between_two() {
    let folder = folder("changed");
    let text = crate::program::text(&folder);
    let line = "--model gpt --data text --batch-size 4 --micro-batch-size 4 --sequence 16";
    train(&folder, &format!("{line} --max-steps 1 --save within")).success();
    train(&folder, &format!("{line} --epochs 1 --save between")).success();
    let changed = fs::read_to_string(&text).expect("a text").replacen("stage", "place", 1);
    fs::write(&text, changed).expect("written");
    train(&folder, "--resume within --max-steps 2")
        .code(1)
        .stderr(predicate::str::contains("--data text has changed since"));
    train(&folder, "--resume between --epochs 2").success().stderr(predicate::str::contains(
        "--data text has changed since the run was saved; its next epoch is of the data as they are now",
    ));
}

#[test]
fn steps_that_are_asked_for_are_all_done() {
    let folder = folder("steps");
    // An epoch has 12 steps: ten epochs have 120.
    let lines = json_lines(&folder, "--max-steps 125 --save a");
    assert_eq!(lines.last().expect("a line")["step"], 125);
    train(&folder, "--max-steps 3 --epochs 2").code(2);
}

/// All features for longer runs at once.
const LONG: &str = "--batch-size 32 --max-steps 200 --clip-norm 1 --warmup 20 \
                    --ema 0.9 --accumulate 2 --eval-every 50 --save-every 20 --keep 3 \
                    --learning-rate-decay cosine";

/// On the device, and offloaded, where the optimizer updates weights during the next step.
const ON_THE_DEVICE: &str = "--micro-batch-size 8";
const OFFLOADED: &str = "--offload all --num-micro-batches 4";

struct LongRun {
    folder: PathBuf,
    place: &'static str,
}

impl LongRun {
    fn start(&self, resume: bool) -> Child {
        let resume = if resume { "--resume m.safetensors" } else { "" };
        let files = "--save m.safetensors --log log.csv --events events";
        let train = format!("train --device cpu --threads 1 {LONG} {files} {resume}");
        start_in(&self.folder, &format!("{train} {}", self.place))
    }

    fn finish(&self, resume: bool) {
        let run = self.start(resume).wait_with_output().expect("a run");
        assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    }

    /// Returns the log without the columns that depend on time.
    fn log(&self) -> Vec<String> {
        let text = fs::read_to_string(self.folder.join("log.csv")).expect("a log");
        let column = |number: &usize| ![4, 5].contains(number);
        let line = |line: &str| {
            let values = line.split(',').enumerate().filter(|(number, _)| column(number));
            values.map(|(_, value)| value).collect::<Vec<_>>().join(",")
        };
        text.lines().map(line).collect()
    }
}

#[test]
fn a_run_that_is_killed_three_times_ends_in_the_same_files() {
    check_killed("long", ON_THE_DEVICE);
}

#[test]
fn so_does_one_whose_optimizer_was_offloaded() {
    check_killed("offload", OFFLOADED);
}

fn check_killed(name: &str, place: &'static str) {
    let [whole, killed] = ["whole", "killed"]
        .map(|which| LongRun { folder: folder(&format!("{name}-{which}")), place });
    whole.finish(false);
    let file = killed.folder.join("m.safetensors");
    for kill in 0..3 {
        let mut run = killed.start(kill > 0);
        while !file.exists() {
            sleep(Duration::from_millis(2));
        }
        // Kills at an arbitrary time, derived from the process number.
        sleep(Duration::from_millis(u64::from((run.id() * 37) % 400)));
        run.kill().expect("killed");
        run.wait().expect("gone");
    }
    killed.finish(true);
    let expected = [
        "events",
        "log.csv",
        "m.safetensors",
        "m.step-180.safetensors",
        // Saved at the end of an epoch.
        "m.step-184.safetensors",
        "m.step-200.safetensors",
    ];
    assert_eq!(names(&whole.folder), expected);
    // A file that was being written at a kill may remain under another name.
    let left = names(&killed.folder).into_iter().filter(|name| !name.starts_with('.'));
    assert_eq!(left.collect::<Vec<_>>(), expected);
    for name in expected.iter().filter(|name| name.ends_with(".safetensors")) {
        let [whole, killed] = [&whole, &killed].map(|run| saved(run.folder.join(name)));
        assert_eq!(whole, killed, "{name}");
    }
    assert_eq!(whole.log(), killed.log());
}
