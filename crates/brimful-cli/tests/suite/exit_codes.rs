//! Exit codes documented in `--help`, and every command: code and message.

use crate::program::{complains, folder, like, lines, refused, run};
use predicates::prelude::*;
use serde_json::Value;

/// Asserts a command's exit code and message.
fn ends(arguments: &str, code: i32, says: &str) {
    match code {
        0 => run(arguments).success().stdout(predicate::str::contains(says)),
        _ => refused(arguments, code, says),
    };
}

#[test]
fn doctor_says_versions_devices_and_that_all_is_well() {
    run("doctor").success().stdout(
        predicate::str::contains("libtorch  2.11.0")
            .and(predicate::str::contains("to build a crate of yours: export LIBTORCH=/"))
            .and(predicate::str::contains("cpu "))
            .and(predicate::str::contains("Nothing is wrong.")),
    );
}

#[test]
fn doctor_speaks_json() {
    let told = lines("doctor --json");
    let [report] = &told[..] else { panic!("one JSON object, not {told:?}") };
    assert_eq!(report["libtorch"], "2.11.0");
    let folder = std::path::Path::new(report["libtorch_folder"].as_str().expect("a folder"));
    assert!(folder.join("lib/libtorch.so").exists(), "{}", folder.display());
    let loaded = report["loaded"].as_array().expect("a list");
    let is_there = |path: &Value| std::path::Path::new(path.as_str().expect("a path")).is_file();
    assert!(loaded.iter().all(is_there), "{loaded:?}");
    // The system reports the path behind all links.
    let library = report["library"].as_str().expect("a path");
    let library = std::fs::canonicalize(library).expect("it is there").display().to_string();
    assert!(loaded.contains(&Value::String(library)), "{loaded:?}");
    let cpu = &report["devices"][0];
    assert_eq!(cpu["name"], "cpu");
    assert!(cpu["total_bytes"].as_u64() >= cpu["free_bytes"].as_u64());
    assert_eq!(report["problems"], Value::Array(vec![]));
}

#[test]
fn the_demo_runs_out_and_then_trains() {
    run("demo").success().stdout(
        predicate::str::contains("A plain step:\n  out of memory in arena 'cpu': asked for")
            .and(like("epoch  20 .*  acc  9[5-9].. % ")),
    );
}

#[test]
fn what_is_done_ends_with_0() {
    ends("plan -s 2 -m 4 --schedule 1f1b", 0, "1f1b");
    ends("verify --batch-size 5 --micro-batch-size 2", 0, "equal up to rounding");
    let folder = folder("done");
    let (run, page) = (folder.join("run.json"), folder.join("run.html"));
    ends(&format!("train --epochs 1 --device cpu --record {}", run.display()), 0, "epoch   1");
    ends(&format!("report {} -o {}", run.display(), page.display()), 0, "wrote ");
    ends("completions bash", 0, "_brimful()");
    ends("man", 0, ".TH brimful 1");
    ends("man train", 0, "brimful-train");
    ends("--help", 0, "Exit codes:");
    ends("--version", 0, "brimful ");
}

#[test]
fn every_command_has_help_with_examples() {
    let commands = "doctor demo train predict evaluate generate plan report verify completions man";
    for command in commands.split(' ') {
        ends(&format!("{command} --help"), 0, "Examples:\n  ");
    }
}

#[test]
fn what_breaks_off_ends_with_1() {
    complains("train --resume /no/such/file", 1, "brimful: cannot resume /no/such/file");
    ends("plan --profile /no/such/file --batch-size 8 -s 2", 1, "cannot read /no/such/file");
    ends("plan --config /no/such/file", 1, "brimful: cannot read /no/such/file");
}

#[test]
fn wrong_use_ends_with_2_and_names_what_was_meant() {
    ends("trian", 2, "'train'");
    ends("train --micro-bacth 4", 2, "'--micro-batch-size'");
    ends("train --model resnet81", 2, "did you mean 'resnet18'?");
    ends("train --optimizer adamx", 2, "'adam'");
    ends("train -s 2 --schedule gpip", 2, "did you mean 'gpipe'?");
    ends("train -s 2 --recompute neber", 2, "did you mean 'never'?");
    ends("plan -s 2 -m 4 --schedule 1b1f", 2, "did you mean '1f1b'?");
    ends("train --device cuda:99", 2, "there is no device 'cuda:99' here; there is cpu");
    ends("train --save /no/such/folder/model", 2, "there is no folder /no/such/folder");
    ends("verify --micro-batch-size 0", 2, "give a whole number from 1 on");
    ends("completions tcsh", 2, "possible values: bash");
    ends("man trian", 2, "brimful has no command 'trian'; did you mean 'train'?");
    ends("doctor --quiet --verbose", 2, "cannot be used with");
    ends("report", 2, "<RUN>");
    ends("demo --fast", 2, "unexpected argument");
}

#[test]
fn what_does_not_fit_ends_with_3_in_one_line_of_cause_and_remedy() {
    let train = "train --batch-size all --micro-batch-size 1437 --memory-limit 8MiB --device cpu";
    let says =
        "^brimful: out of memory in arena 'cpu': .*limit 8388608; try --micro-batch-size 719\n$";
    run(train).code(3).stderr(like(says));
    ends("train --memory-limit 200KiB --device cpu", 3, "brimful: ");
    ends("plan -s 2 -m 4 --activations 3GiB --memory-limit 1GiB", 3, "");
}

#[test]
fn a_check_that_finds_a_fault_ends_with_4() {
    let verify = "verify --dtype f32 --batch-size 5 --micro-batch-size 2 --tolerance 0";
    run(verify).code(4).stdout(predicate::str::contains("NOT equal"));
}

#[test]
fn verbose_tells_the_causes_and_the_log() {
    let train = "train --verbose --epochs 1 --micro-batch-size 1437 --batch-size all --memory-limit 8MiB --device cpu";
    ends(train, 3, "\n  from out of memory in arena 'cpu'");
    let deadlock = "plan --schedule-file tests/data/deadlock.csv";
    ends(deadlock, 1, "device 1 waits in 1F1 for stage 0 (--verbose shows the rest)\n");
    ends(&format!("{deadlock} --verbose"), 1, "\ndevice 1    1F0  [1F1]");
}

#[test]
fn manual_pages_are_written_for_every_command() {
    let pages = folder("man");
    ends(&format!("man --folder {}", pages.display()), 0, "");
    let names = crate::program::names(&pages);
    for name in ["brimful.1", "brimful-train.1", "brimful-plan.1"] {
        assert!(names.iter().any(|page| page == name), "{names:?}");
    }
    ends("man --folder /no/such/folder", 1, "cannot write the pages into /no/such/folder");
}
