//! Defaults for fine-tuning a folder's weights, and the report of every setting.

use std::fs;
use std::path::{Path, PathBuf};

use crate::program::{folder, refused, run, stdout, text, train_in};
use brimful::save;
use predicates::prelude::*;
use tch::Kind;

/// Makes a folder with a model of a few steps, in bf16, and a text beside it.
fn trained(name: &str) -> PathBuf {
    let folder = folder(name);
    text(&folder);
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/tiny-llama");
    let from = format!("--model {} --from-scratch --dtype bf16", tiny.display());
    let train = "--data text --sequence 16 --batch-size 8 --max-steps 2 --save model";
    train_in(&folder, &format!("{from} {train}")).success();
    folder
}

/// Returns the settings that a run prints before its first step, each with its source.
fn settings(said: &str) -> Vec<String> {
    let lines = said.lines().filter(|line| line.starts_with("  --"));
    lines.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}

#[test]
fn settings_of_a_folder_are_those_of_tuning_and_are_said_with_where_they_are_from() {
    let folder = trained("tuning-defaults");
    let run = train_in(&folder, "--model model --data text --save tuned");
    let said = stdout(&run.success());
    let expected = [
        "--learning-rate 0.00002 default for fine-tuning",
        "--warmup 1 3 % of all steps",
        "--epochs 3 default for fine-tuning",
        "--sequence 256 tokens, at most 2048, the model's or the text's",
        "--batch-size 64 samples, at most 16384 tokens together",
        "--dtype bf16 dtype of the stored weights",
    ];
    assert_eq!(settings(&said), expected, "{said}");
    let (tensors, _) = save::read(folder.join("tuned/model.safetensors")).expect("saved");
    assert!(tensors.iter().all(|(_, tensor)| tensor.kind() == Kind::BFloat16));

    let flags = "--lr 0.5 --warmup 0 --epochs 1 --sequence 8 --batch-size 64 --dtype f32 --lora 2";
    let run = train_in(&folder, &format!("--model model --data text {flags}")).success();
    let said = stdout(&run);
    let given =
        ["--learning-rate 0.5", "--warmup 0", "--epochs 1", "--sequence 8", "--batch-size 64"];
    let given: Vec<_> =
        given.iter().chain(&["--dtype f32"]).map(|flag| format!("{flag} given")).collect();
    assert_eq!(settings(&said), given, "{said}");
    let counted = "model, 6720 of 152576 parameters trained, on cpu";
    assert!(said.starts_with(counted), "{said}");

    // The longest sequences for which a short text suffices.
    fs::write(folder.join("short"), "Once upon a time. ".repeat(60)).expect("written");
    let run = train_in(&folder, "--model model --data short --lora 2 --max-steps 40").success();
    let said = settings(&stdout(&run));
    assert_eq!(said[0], "--learning-rate 0.0002 default for LoRA");
    assert_eq!(said[3], "--sequence 26 tokens, at most 2048, the model's or the text's");
    assert_eq!(said[1..3], ["--warmup 2 3 % of all steps", "--max-steps 40 given"]);
}

#[test]
fn a_run_goes_on_with_the_settings_that_were_not_said() {
    let folder = trained("tuning-resume");
    let train = "--model model --data text --lora 2";
    train_in(&folder, &format!("{train} --epochs 1 --save run.safetensors")).success();
    let metadata = crate::program::saved(folder.join("run.safetensors")).1;
    assert_eq!((metadata["dtype"].as_str(), metadata["sequence"].as_str()), ("bf16", "256"));
    let resumed = format!("{train} --epochs 2 --resume run.safetensors");
    train_in(&folder, &resumed).success();
    train_in(&folder, &format!("{resumed} --dtype f32"))
        .failure()
        .stderr(predicate::str::contains("it was made with --dtype bf16"));
}

#[test]
fn a_model_that_begins_with_random_numbers_has_the_settings_of_training() {
    let folder = trained("tuning-scratch");
    let run = train_in(&folder, "--model model --from-scratch --data text --max-steps 1").success();
    let said = stdout(&run);
    assert_eq!(settings(&said), Vec::<String>::new());
    assert!(said.contains("sequences of 64 tokens"), "{said}");
}

#[test]
fn a_folder_writes_in_the_dtype_that_its_weights_are_stored_in() {
    let folder = trained("tuning-generate");
    let generate = |flags: &str| {
        let line = format!("generate --model model --prompt A --tokens 4 --temperature 0 {flags}");
        stdout(&crate::program::run_in(&folder, &line).success())
    };
    assert_eq!(generate(""), generate("--dtype bf16"));
}

#[test]
fn numbers_that_no_training_can_have_are_refused_in_words() {
    refused("train --warmup -3 --epochs 1", 2, "--warmup <STEPS>': give a whole number from 0 on");
    refused(
        "train --optimizer sgd --momentum 2",
        2,
        "--momentum 2: give a number from 0 to below 1",
    );
    refused(
        "train --optimizer adafactor --optimizer-state 8bit",
        2,
        "--optimizer-state 8bit: --optimizer adafactor keeps rows and columns alone",
    );
    refused(
        "train --max-steps 5 --warmup 6 --device cpu",
        2,
        "--warmup 6: the training has only 5 steps",
    );
    run("train --max-steps 5 --warmup 5 --device cpu").success();
}

#[test]
fn every_optimizer_and_number_format_trains_and_goes_on() {
    let folder = folder("optimizers");
    let line = |flags: &str, steps: u32, save: &str| {
        let train = "train --device cpu --batch-size 256 --micro-batch-size 64 --overwrite";
        let line = format!("{train} --optimizer {flags} --max-steps {steps} --save {save}");
        crate::program::run_in(&folder, &line).success();
    };
    for flags in ["adafactor", "muon --optimizer-state bf16", "adamw --optimizer-state 8bit"] {
        line(flags, 6, "whole.safetensors");
        line(flags, 3, "run.safetensors");
        line(&format!("{flags} --resume run.safetensors"), 6, "run.safetensors");
        crate::program::assert_alike(
            folder.join("whole.safetensors"),
            folder.join("run.safetensors"),
        );
    }
    line("adamw --resume run.safetensors", 7, "run.safetensors");
    let other =
        "train --device cpu --batch-size 256 --optimizer-state f32 --resume run.safetensors";
    crate::program::run_in(&folder, &format!("{other} --max-steps 8"))
        .failure()
        .stderr(predicate::str::contains("it was made with --optimizer-state 8bit"));
}
