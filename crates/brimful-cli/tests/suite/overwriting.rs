//! A training overwrites none of its inputs, and other runs' files only if asked to.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command as Process;

use crate::program::{folder, names, saved, train_in};
use predicates::prelude::*;

fn refuses(folder: &Path, line: &str, says: &str) {
    let before = names(folder);
    train_in(folder, line).code(2).stderr(predicate::str::contains(says));
    assert_eq!(names(folder), before, "{line}");
}

#[test]
fn what_an_earlier_run_has_left_stays_unless_it_is_given_up() {
    let folder = folder("earlier");
    let train = "--max-steps 2 --save-every 1";
    let keep = format!("{train} --save a.safetensors --keep 1 --log log.csv --events events");
    train_in(&folder, &keep).success();
    train_in(&folder, &format!("{train} --save b.safetensors --keep best --record r.json"))
        .success();
    let other = "exists already: name another, or give --overwrite";
    refuses(
        &folder,
        &format!("{train} --save a.safetensors"),
        "resume it by --resume a.safetensors",
    );
    for flags in ["--log log.csv", "--events events", "--record r.json", "--report r.json"] {
        refuses(&folder, &format!("--max-steps 2 {flags}"), other);
    }
    // The files beside the named one belong to that run too.
    fs::rename(folder.join("a.safetensors"), folder.join("c")).expect("moved");
    fs::rename(folder.join("b.safetensors"), folder.join("d")).expect("moved");
    refuses(
        &folder,
        &format!("{train} --save a.safetensors --keep 2"),
        "--keep a.step-2.safetensors exists",
    );
    refuses(
        &folder,
        &format!("{train} --save b.safetensors --keep best"),
        "--keep b.best.safetensors exists",
    );
    // A resumed run does not overwrite another run.
    refuses(&folder, "--resume c --save d --max-steps 3", "--save d exists already");
    train_in(&folder, "--resume c --save d --max-steps 3 --overwrite").success();
    assert_eq!(saved(folder.join("d")).1["step"], "3");
    fs::write(folder.join("empty"), "").expect("written");
    train_in(&folder, &format!("{train} --save empty")).success();
    train_in(&folder, &format!("{keep} --overwrite")).success();
}

#[test]
fn nothing_that_is_read_is_written_over() {
    let folder = folder("inputs");
    let text = crate::program::text(&folder);
    let tiny = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/tiny-llama");
    let line = format!("--data {text} --sequence 8 --batch-size 4 --max-steps 1 --overwrite");
    train_in(&folder, &format!("{line} --model {tiny} --from-scratch --save m.best")).success();
    fs::copy(folder.join("text"), folder.join("m.best/extra.txt")).expect("copied");
    train_in(&folder, "--max-steps 1 --save n.step-40.safetensors").success();
    train_in(&folder, "--max-steps 1 --save n.best.safetensors").success();
    symlink("m.best", folder.join("link")).expect("a link");
    for (flags, says) in [
        ("--model m.best --save m --keep best", "--keep m.best would overwrite what --model reads"),
        ("--model link --save m.best", "--save m.best would overwrite what --model reads"),
        ("--model m.best --save link", "--save link would overwrite what --model reads"),
        ("--model m.best --log m.best/config.json", "would overwrite what --model reads"),
        ("--model m.best --save new --log new/log.csv", "there is no folder new"),
    ] {
        refuses(&folder, &format!("{line} {flags}"), says);
    }
    for (flags, says) in [
        (
            "--init n.best.safetensors --save n.safetensors --keep best",
            "overwrite what --init reads",
        ),
        (
            "--init n.step-40.safetensors --save n.safetensors --keep 2",
            "overwrite what --init reads",
        ),
    ] {
        refuses(&folder, &format!("--max-steps 1 --overwrite {flags}"), says);
    }
    let within =
        format!("--model {tiny} --from-scratch --data m.best/extra.txt --overwrite --save m.best");
    refuses(&folder, &within, "--save m.best would overwrite what --data reads");
    fs::create_dir(folder.join("new")).expect("a folder");
    let log = format!("{line} --model m.best --save new --log new/log.csv");
    refuses(&folder, &log, "--log new/log.csv is in the folder that --save replaces");
}

#[test]
fn links_are_followed_and_a_stream_that_leads_to_a_file_is_written_on() {
    let folder = folder("links");
    symlink("run.safetensors", folder.join("newest")).expect("a link");
    train_in(&folder, "--max-steps 2 --save-every 1 --keep 1 --save newest").success();
    assert!(folder.join("newest").is_symlink() && !folder.join("run.safetensors").is_symlink());
    assert_eq!(saved(folder.join("newest")).1["step"], "2");

    let line = "exec \"$0\" plan -s 2 -m 4 --schedule gpipe --svg /dev/stdout > drawn 2> said";
    let mut shell = Process::new("sh");
    shell.args(["-c", line, env!("CARGO_BIN_EXE_brimful")]).current_dir(&folder);
    assert!(shell.status().expect("a shell").success());
    let drawn = fs::read_to_string(folder.join("drawn")).expect("text");
    assert!(drawn.starts_with("<svg") && drawn.contains("</svg>"), "{drawn}");
    assert!(
        drawn.split_once("</svg>").is_some_and(|(_, after)| after.contains("gpipe")),
        "{drawn}"
    );
    assert!(Path::new("/dev/stdout").is_symlink());
}
