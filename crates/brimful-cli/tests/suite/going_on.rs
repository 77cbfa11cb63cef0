//! Resumed runs of folders, and adapters that are trained further.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command as Process};
use std::thread::sleep;
use std::time::Duration;

use crate::program::{folder, like, names, run_in, saved, start_in, train_in};
use brimful::save;
use predicates::prelude::*;

const RUN: &str = "brimful_run.safetensors";
const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/tiny-llama");
const LINE: &str = "--data text --sequence 16 --batch-size 4 --micro-batch-size 2";

/// Makes a folder with a text, and a model of random weights in `base`.
fn with_base(name: &str) -> PathBuf {
    let folder = folder(name);
    crate::program::text(&folder);
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
    for (resumed, says) in [
        (
            "adapter --max-steps 30",
            "it holds the adapter alone: train that on by --adapter adapter",
        ),
        ("model --max-steps 30", "it holds the model alone: train that on by --model model"),
        ("model/model.safetensors", "it holds weights and no run: train them by --model model"),
        (
            "base/model.safetensors --model base --data text --sequence 16",
            "it holds weights and no run: train them by",
        ),
        (".", "it is a folder without brimful_run.safetensors"),
    ] {
        let resume = format!("train --resume {resumed}");
        run_in(&folder, &resume).code(1).stderr(predicate::str::contains(says));
    }
    train_in(&folder, &format!("{LINE} --model base --max-steps 1 --save f.safetensors")).success();
    train_in(&folder, "--resume f.safetensors --lora 2")
        .code(1)
        .stderr(like("made with no --lora, but this run has --lora 2:4: leave --lora out"));
}

#[test]
fn a_save_that_was_killed_leaves_one_folder_which_the_next_run_removes() {
    let folder = with_base("killed-save");
    let parts = || names(&folder).into_iter().filter(|name| name.ends_with(".part"));
    let line = format!("{LINE} --model base --max-steps 60 --save-every 1 --save run");
    let mut run = start_in(&folder, &format!("train --device cpu {line}"));
    let mut most = 0;
    while most == 0 || !folder.join("run").exists() {
        most = most.max(parts().count());
        assert!(run.try_wait().expect("a run").is_none(), "it has ended by itself");
    }
    for _ in 0..300 {
        most = most.max(parts().count());
    }
    while parts().count() == 0 {}
    run.kill().expect("killed");
    run.wait().expect("gone");
    assert_eq!(most, 1, "temporary folders at once");
    train_in(&folder, "--resume run").success();
    assert_eq!(parts().collect::<Vec<_>>(), Vec::<String>::new());
}

#[test]
fn a_run_does_not_go_on_over_another_base_model() {
    let folder = with_base("other-base");
    let line = format!("{LINE} --model base --lora 2 --max-steps 24 --save-every 2 --save run");
    let run = start_in(&folder, &format!("train --device cpu {line}"));
    stop(run, &folder.join("run").join(RUN));
    let others = format!("--model {TINY} --from-scratch {LINE} --max-steps 1 --seed 1");
    fs::rename(folder.join("base"), folder.join("first")).expect("moved");
    train_in(&folder, &format!("{others} --save base")).success();
    train_in(&folder, "--resume run").code(1).stderr(predicate::str::contains(
        "--model base holds other weights or another description now than it was made with",
    ));
    train_in(&folder, "--resume run --model first --max-steps 25").success();
}

/// Writes an adapter with zeros up to this rank.
fn widen(from: &Path, to: &Path, rank: i64) {
    fs::create_dir(to).expect("a folder");
    let (tensors, metadata) = saved(from.join("adapter_model.safetensors"));
    let widened = tensors.into_iter().map(|(name, tensor)| {
        let rank_first = name.ends_with("lora_A.weight");
        let more = rank - tensor.size()[usize::from(!rank_first)];
        let pads = if rank_first { [0, 0, 0, more] } else { [0, more, 0, 0] };
        (name, tensor.constant_pad_nd(pads))
    });
    let widened: Vec<_> = widened.collect();
    save::write(to.join("adapter_model.safetensors"), &widened, &metadata).expect("written");
    let config = fs::read_to_string(from.join("adapter_config.json")).expect("read");
    let config = config.replace("\"r\": 2", &format!("\"r\": {rank}"));
    fs::write(to.join("adapter_config.json"), config).expect("written");
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
    let config = folder.join("first/adapter_config.json");
    let told = fs::read_to_string(&config).expect("read");
    fs::write(&config, told.replace("\"lora_dropout\": 0.0", "\"lora_dropout\": 0.05"))
        .expect("written");
    train_in(&folder, &format!("{line} --adapter first"))
        .success()
        .stderr(like("--adapter: lora_dropout 0.05 of its adapter_config.json is not applied"));
    widen(&folder.join("first"), &folder.join("wide"), 300);
    train_in(&folder, &format!("{line} --adapter wide --learning-rate 0 --save fourth")).success();
    train_in(&folder, &format!("{line} --lora 300")).code(2).stderr(like("give at most 64"));
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
