//! Files that cannot be written: a clear line, nothing left behind, the documented code.

mod program;

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::process::Command as Process;

use predicates::prelude::*;
use program::{brimful, folder, names};

#[test]
fn a_device_is_written_to_and_stays_one() {
    for (arguments, flag) in [
        ("plan -s 2 -m 4", "--svg"),
        ("plan -s 2 -m 4", "--trace"),
        ("train --epochs 1 --device cpu", "--save"),
    ] {
        let run = brimful().args(arguments.split(' ')).args([flag, "/dev/full"]).assert().code(1);
        run.stderr(
            predicate::str::is_match(
                "^brimful: cannot write '/dev/full': No space left on device.*\n$",
            )
            .expect("a pattern"),
        );
        let device = fs::metadata("/dev/full").expect("still there");
        assert!(device.file_type().is_char_device());
    }
    let run = brimful().args("plan -s 2 -m 4 --svg /dev/stdout".split(' ')).assert().success();
    run.stdout(predicate::str::starts_with("<svg"));
}

/// Runs a line of shell in which `$0` is the program.
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

/// What `ulimit -f` does is what a full disk does: the write that crosses the line fails.
#[test]
fn a_model_that_outgrows_the_disk_leaves_the_old_file() {
    let folder = folder("full-disk");
    let model = folder.join("model.safetensors");
    fs::write(&model, "the old one").expect("written");
    let save = model.display();
    let (code, complaint) =
        shell(&format!("ulimit -f 64; exec \"$0\" train --epochs 1 --device cpu --save {save}"));
    assert!(complaint.starts_with("brimful: cannot write "), "{complaint}");
    assert!(complaint.contains("File too large"), "{complaint}");
    assert_eq!(code, Some(1));
    assert_eq!(names(&folder), ["model.safetensors"]);
    assert_eq!(fs::read_to_string(&model).expect("still there"), "the old one");
}

#[test]
fn a_log_that_outgrows_the_disk_ends_with_a_whole_line_and_the_run_goes_on() {
    let folder = folder("full-disk-log");
    let (log, events) = (folder.join("steps.csv"), folder.join("events"));
    // Two blocks of 512 bytes hold some of the lines.
    let line = format!(
        "ulimit -f 2; exec \"$0\" train --epochs 1 --batch-size 32 --device cpu --log {} --events {}",
        log.display(),
        events.display()
    );
    let (code, said) = shell(&line);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(said.matches("the run goes on without this log").count(), 2, "{said}");
    let log = fs::read_to_string(&log).expect("a log");
    assert!(log.ends_with('\n') && log.lines().count() > 3, "{log}");
    let columns: Vec<usize> = log.lines().map(|line| line.split(',').count()).collect();
    assert!(columns.iter().all(|count| *count == columns[0]), "{log}");
}
