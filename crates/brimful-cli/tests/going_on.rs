//! Resumed runs of folders, and adapters that are trained further.

mod program;

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command as Process};
use std::thread::sleep;
use std::time::Duration;

use predicates::prelude::*;
use program::{folder, like, names, run_in, saved, start_in, train_in};

const RUN: &str = "brimful_run.safetensors";
const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/tiny-llama");
const LINE: &str = "--data text --sequence 16 --batch-size 4 --micro-batch-size 2";

/// Makes a folder with a text, and a model of random weights in `base`.
fn with_base(name: &str) -> PathBuf {
    let folder = folder(name);
    program::text(&folder);
    let train = format!("--model {TINY} --from-scratch {LINE} --max-steps 1 --save base");
    train_in(&folder, &train).success();
    folder
}

/// Waits until a run has saved here, interrupts it, and returns the command that it prints for resuming.
fn stop(mut run: Child, saved: &Path) -> String {
    while !saved.exists() {
        sleep(Duration::from_millis(5));
        assert!(run.try_wait().expect("a run").is_none(), "it has ended by itself");
    }
    let kill = format!("kill -TERM {}", run.id());
    assert!(Process::new("sh").args(["-c", &kill]).status().expect("a shell").success());
    let mut told = String::new();
    run.stderr.take().expect("a pipe").read_to_string(&mut told).expect("text");
    assert_eq!(run.wait().expect("an end").code(), Some(143), "{told}");
    let command = told.lines().find_map(|line| line.split_once(" train --resume "));
    format!("train --resume {}", command.expect(&told).1)
}

/// Returns the content of all files in a folder.
fn contents(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let read = |name: String| (name.clone(), fs::read(folder.join(name)).expect("read"));
    names(folder).into_iter().map(read).collect()
}

#[test]
fn a_stopped_run_of_a_folder_goes_on_by_the_command_that_it_says() {
    let folder = with_base("going-on");
    for (name, more) in [
        ("adapter", "--lora 2 --ema 0.9"),
        ("merged", "--lora 2 --merge"),
        ("model", ""),
        ("averages", "--ema 0.9 --stages 2"),
    ] {
        let line = format!("{LINE} --model base {more} --max-steps 24 --save-every 2");
        train_in(&folder, &format!("{line} --save whole-{name}")).success();
        let line = format!("train --device cpu {line} --save {name}");
        let command = stop(start_in(&folder, &line), &folder.join(name).join(RUN));
        assert_eq!(command, format!("train --resume {name}"));
        assert!(saved(folder.join(name).join(RUN)).1["step"] != "0", "{name}");
        run_in(&folder, &command).success();
        let [whole, rest] = [format!("whole-{name}"), name.to_owned()];
        assert_eq!(contents(&folder.join(whole)), contents(&folder.join(rest)), "{name}");
    }
    // A finished run cannot resume, and the error says what the folder is for.
    run_in(&folder, "train --resume adapter")
        .code(1)
        .stderr(like("without brimful_run.safetensors"));
}

#[test]
fn an_adapter_is_trained_on() {
    let folder = with_base("trained-on");
    let line = format!("{LINE} --model base --max-steps 1");
    train_in(&folder, &format!("{line} --lora 2:6 --learning-rate 0.1 --save first")).success();
    // Without learning, the adapter stays the same.
    train_in(&folder, &format!("{line} --adapter first --learning-rate 0 --save second")).success();
    let weights = |name: &str| {
        fs::read(folder.join(name).join("adapter_model.safetensors")).expect("weights")
    };
    assert_eq!(weights("first"), weights("second"));
    train_in(&folder, &format!("{line} --adapter first --learning-rate 0.1 --save third"))
        .success();
    assert_ne!(weights("first"), weights("third"));
    for (flags, says) in [
        ("--adapter first --save first", "would overwrite what --adapter reads"),
        ("--adapter first --lora 2", "cannot be used with"),
        (
            "--adapter first --from-scratch",
            "needs the base weights, which --from-scratch does not read",
        ),
        ("--adapter base", "--adapter: "),
        ("--merge", "--merge is for an adapter: give --lora or --adapter too"),
    ] {
        train_in(&folder, &format!("{line} {flags}"))
            .code(2)
            .stderr(predicate::str::contains(says));
    }
    train_in(&folder, "--adapter first")
        .code(2)
        .stderr(like("--adapter is for a model of a folder"));
}
