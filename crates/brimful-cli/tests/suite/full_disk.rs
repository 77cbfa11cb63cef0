//! Files that cannot be written: a clear line, nothing left behind, and the documented exit code.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::process::Command as Process;

use crate::program::{folder, like, names, refused, run};
use predicates::prelude::*;

#[test]
fn a_device_is_written_to_and_stays_one() {
    for (arguments, flag) in [
        ("plan -s 2 -m 4", "--svg"),
        ("plan -s 2 -m 4", "--trace"),
        ("train --epochs 1 --device cpu", "--save"),
    ] {
        let says = like("^brimful: cannot write '/dev/full': No space left on device.*\n$");
        run(&format!("{arguments} {flag} /dev/full")).code(1).stderr(says);
        let device = fs::metadata("/dev/full").expect("still there");
        assert!(device.file_type().is_char_device());
    }
    let drawn = run("plan -s 2 -m 4 --svg /dev/stdout").success();
    drawn.stdout(predicate::str::starts_with("<svg"));
}

/// Runs a shell line with the program as `$0`.
fn shell(line: &str) -> (Option<i32>, String) {
    let program = env!("CARGO_BIN_EXE_brimful");
    let output = Process::new("sh").args(["-c", line, program]).output().expect("a shell");
    (output.status.code(), String::from_utf8(output.stderr).expect("text"))
}

#[test]
fn results_that_cannot_be_written_are_no_success() {
    let (code, complaint) = shell("exec \"$0\" doctor > /dev/full");
    let expected = "brimful: cannot write to standard output: No space left on device";
    assert!(complaint.starts_with(expected), "{complaint}");
    assert_eq!(code, Some(1));
    assert_eq!(shell("exec \"$0\" --help > /dev/full").0, Some(1));
}

/// `ulimit -f` acts like a full disk: the write beyond the limit fails.
#[test]
fn a_model_that_outgrows_the_disk_leaves_the_old_file() {
    let folder = folder("full-disk");
    let model = folder.join("model.safetensors");
    fs::write(&model, "the old one").expect("written");
    let save = model.display();
    let (code, complaint) = shell(&format!(
        "ulimit -f 64; exec \"$0\" train --epochs 1 --device cpu --overwrite --save {save}"
    ));
    assert!(complaint.starts_with("brimful: cannot write "), "{complaint}");
    assert!(complaint.contains("File too large"), "{complaint}");
    assert_eq!(code, Some(1));
    assert_eq!(names(&folder), ["model.safetensors"]);
    assert_eq!(fs::read_to_string(&model).expect("still there"), "the old one");
}

#[test]
fn a_folder_that_cannot_be_written_is_refused_before_the_first_step() {
    let train = "train --model ../../examples/tiny-llama --from-scratch --device cpu --data ../../README.md \
                 --save /no/such/folder";
    let says = "^brimful: --save /no/such/folder: nothing can be written beside it; make its folder first, or \
                name another: No such file.*\n$";
    run(train).code(1).stderr(like(says));
}

/// A file being written during the next step is completed, even if that step fails.
#[test]
fn a_run_that_breaks_off_finishes_the_file_that_it_writes() {
    let folder = folder("broken-off");
    let file = folder.join("run.safetensors");
    let train = "train --device cpu --optimizer sgd --learning-rate 1e30 --save-every 1 --save";
    let words = "step 2: this step was not applied; lower --learning-rate";
    refused(&format!("{train} {}", file.display()), 1, words);
    assert_eq!(names(&folder), ["run.safetensors"]);
    let (_, told) = crate::program::saved(&file);
    assert_eq!((told["epoch"].as_str(), told["step"].as_str()), ("0", "1"));
}

/// A model too large for any disk is refused before it is built; it is too large for any memory as well.
#[test]
fn a_full_disk_is_refused_before_the_first_step() {
    let folder = folder("no-room");
    let config = fs::read_to_string("../../examples/tiny-llama/config.json").expect("a config");
    let config = config
        .replace(r#""hidden_size": 64"#, r#""hidden_size": 1048576"#)
        .replace(r#""intermediate_size": 160"#, r#""intermediate_size": 4194304"#)
        .replace(r#""num_hidden_layers": 3"#, r#""num_hidden_layers": 64"#);
    let model = folder.join("model");
    fs::create_dir(&model).expect("a folder");
    fs::write(model.join("config.json"), config).expect("written");
    let text = crate::program::text(&folder);
    let train = format!("train --from-scratch --device cpu --data {text} --sequence 8");
    let bytes = "[0-9.]+ TiB";
    for (save, more, needs) in [
        ("run.safetensors", "--max-steps 1", bytes.to_owned()),
        ("run.safetensors", "--epochs 2", format!(r"{bytes} \(2 files of {bytes}: .*\)")),
        ("run.safetensors", "--epochs 5 --keep 3", format!(r"{bytes} \(4 files of {bytes}: .*\)")),
        ("tuned", "--max-steps 1", bytes.to_owned()),
    ] {
        let (model, save) = (model.display(), folder.join(save).display().to_string());
        let refused = run(&format!("{train} --model {model} {more} --save {save}")).code(1);
        assert_eq!(names(&folder), ["model", "text"]);
        refused.stderr(like(&format!(
            "^brimful: --save {save}: it needs {needs}, but its disk has [0-9.]+ .i?B free: free some space, or \
             save elsewhere\n$"
        )));
    }
}

#[test]
fn a_log_that_outgrows_the_disk_ends_with_a_whole_line_and_the_run_goes_on() {
    let folder = folder("full-disk-log");
    let (log, events) = (folder.join("steps.csv"), folder.join("events"));
    // Two blocks of 512 bytes hold only some of the lines.
    let line = format!(
        "ulimit -f 2; exec \"$0\" train --epochs 1 --batch-size 32 --device cpu --log {} --events {}",
        log.display(),
        events.display()
    );
    let (code, said) = shell(&line);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(said.matches("the run continues without this log").count(), 2, "{said}");
    let log = fs::read_to_string(&log).expect("a log");
    assert!(log.ends_with('\n') && log.lines().count() > 3, "{log}");
    let columns: Vec<usize> = log.lines().map(|line| line.split(',').count()).collect();
    assert!(columns.iter().all(|count| *count == columns[0]), "{log}");
}
