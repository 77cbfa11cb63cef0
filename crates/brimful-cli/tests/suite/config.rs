//! Flags from a TOML file: their effect, precedence, and errors with line numbers.

use std::fs;
use std::path::{Path, PathBuf};

use crate::program::{complains, folder, json_lines, lines, run, saved, train_in};
use brimful::save;
use predicates::prelude::*;
use serde_json::Value;

/// Writes a file with this text in a folder of its own.
fn config(name: &str, text: &str) -> PathBuf {
    let path = folder(name).join("run.toml");
    fs::write(&path, text).expect("written");
    path
}

/// Returns the last line of JSON that the command prints.
fn last(path: &Path, arguments: &str) -> Value {
    lines(&format!("{arguments} --config {}", path.display())).pop().expect("a line")
}

const RUN: &str = r#"
quiet = true

[train]
model = "mlp"
batch-size = "all"       # or a number
micro-batch-size = 64
memory-limit = "8MiB"
learning-rate = 5e-3
device = "cpu"
epochs = 3
json = true

[plan]
stages = 2
num-micro-batches = 4
schedule = ["gpipe", "1f1b"]
json = true
"#;

#[test]
fn each_command_takes_its_own_section() {
    let path = config("config-sections", RUN);
    let epoch = last(&path, "train");
    assert_eq!((&epoch["epoch"], &epoch["micro_batch_size"]), (&3.into(), &64.into()));
    let rows = &last(&path, "plan")["rows"];
    assert_eq!(rows.as_array().map(Vec::len), Some(2), "{rows}");
}

#[test]
fn the_command_line_overrules_the_file() {
    let path = config("config-overruled", RUN);
    let epoch = last(&path, "train --epochs 1 --micro-batch-size 32");
    assert_eq!((&epoch["epoch"], &epoch["micro_batch_size"]), (&1.into(), &32.into()));
    // The two flags conflict, so the file's one is left out.
    let epoch = last(&path, "train --epochs 1 --num-micro-batches 8");
    assert_eq!(epoch["micro_batch_size"], 180);
    let rows = &last(&path, "plan --schedule 1f1b -m 8")["rows"];
    assert_eq!((&rows[0]["schedule"], &rows[0]["micro_batches"]), (&"1f1b".into(), &8.into()));
}

#[test]
fn a_switch_of_the_file_is_turned_off_by_the_command_line() {
    let path = config("config-off", RUN);
    let plan = |word: &str| run(&format!("plan {word} --config {}", path.display()));
    let table = plan("--json=false").success();
    table.stdout(predicate::str::contains("makespan").and(predicate::str::contains("{").not()));
    // If there is no switch of this name, the meaning of the word does not change.
    plan("--no-cuda-graphs=false").success();
    plan("--stages=false").code(2);
    plan("--nothing=false").code(2);
}

#[test]
fn what_cannot_be_is_refused_with_file_and_line() {
    let cases = [
        (
            "[train]\nepochs = 1\nmicro_batchs = 4",
            "unknown key 'micro_batchs' in RUN line 3: did you mean 'micro-batch-size'?",
        ),
        ("[train]\nepochs = \"1\"", "RUN line 2: epochs is a whole number"),
        ("[train]\nepochs = 1.5", "RUN line 2: epochs is a whole number"),
        ("[train]\nlearning-rate = \"fast\"", "RUN line 2: learning-rate is a number"),
        (
            "[train]\nmodel = 3",
            "RUN line 2: invalid value '3' for '--model <MODEL>': there is no such model",
        ),
        ("[train]\njson = 1", "RUN line 2: json is true or false"),
        ("[train]\nmodel = [\"mlp\"]", "RUN line 2: model is "),
        (
            "[train]\n\nbatch-size = 0",
            "RUN line 3: invalid value '0' for '--batch-size <N>': give a number from 1 on, or all",
        ),
        ("[train]\noptimizer = \"adamx\"", "RUN line 2: invalid value 'adamx' for '--optimizer"),
        (
            "[train]\nmicro-batch-size = 2\nnum-micro-batches = 3",
            "RUN line 2: the argument '--micro-batch-size <",
        ),
        ("[trian]\nepochs = 1", "unknown section 'trian' in RUN line 1: did you mean 'train'?"),
        ("[plan]\nstage = 4", "unknown key 'stage' in RUN line 2: did you mean 'stages'?"),
        ("epochs = 1", "unknown key 'epochs' in RUN line 1: "),
        ("config = \"other.toml\"", "unknown key 'config' in RUN line 1: "),
        ("[train\nepochs = 1", "RUN is not TOML: line 1: "),
        ("[train]\nepochs =", "RUN is not TOML: line 2: "),
    ];
    for (text, expected) in cases {
        let path = config("config-refused", text);
        let expected = expected.replace("RUN", &path.display().to_string());
        complains(&format!("train --config {}", path.display()), 2, &expected);
    }
}

#[test]
fn old_names_of_flags_are_answered_with_the_new_ones() {
    for (line, words) in [
        ("train --micro-batch 4", "--micro-batch is called --micro-batch-size now"),
        ("train --micro-batches=4", "--micro-batches is called --num-micro-batches now"),
        ("train --homes all", "--homes is called --offload now"),
        ("plan -s 2 --micro-batches 4", "--micro-batches is called --num-micro-batches now"),
    ] {
        complains(line, 2, words);
    }
    let path = config("config-renamed", "[train]\nmicro-batch = 4");
    let shown = path.display();
    let words = format!("micro-batch in {shown} line 2 is called micro-batch-size now");
    complains(&format!("train --config {shown}"), 2, &words);
}

#[test]
fn a_run_that_was_saved_with_old_names_of_flags_is_resumed_with_its_flags() {
    let folder = folder("renamed");
    train_in(&folder, "--micro-batch-size 32 --max-steps 1 --save run").success();
    let (tensors, mut metadata) = saved(folder.join("run"));
    let old = metadata["flags"].replace("micro-batch-size", "micro-batch");
    assert_ne!(old, metadata["flags"]);
    metadata.insert("flags".into(), old);
    save::write(folder.join("run"), &tensors, &metadata).expect("written");
    let resumed = train_in(&folder, "--resume run --max-steps 12 --json").success();
    let epoch = json_lines(&resumed).pop().expect("an epoch");
    assert_eq!(epoch["micro_batch_size"], 32, "{epoch}");
}
