//! A killed or interrupted run resumes and ends with the same file as an uninterrupted one.

use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, Command as Process};
use std::thread::sleep;
use std::time::Duration;

use crate::program::{folder, names, saved, start_in, text};

/// Training of a model with dropout, in a folder of its own.
struct Training {
    folder: PathBuf,
    more: &'static str,
}

impl Training {
    fn new(name: &str, more: &'static str) -> Self {
        let folder = folder(name);
        text(&folder);
        Self { folder, more }
    }

    fn start(&self, file: &str, resume: bool) -> Child {
        let resume = if resume { format!("--resume {file}") } else { String::new() };
        let train = "train --model gpt --device cpu --data text --batch-size 10 --epochs 4";
        start_in(&self.folder, &format!("{train} --save {file} {} {resume}", self.more))
    }

    fn finish(&self, file: &str, resume: bool) {
        let run = self.start(file, resume).wait_with_output().expect("a run");
        assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    }

    /// Starts a run and waits for its first save. The run is then somewhere after its first epoch, and may be
    /// writing.
    fn begun(&self, file: &str) -> Child {
        let run = self.start(file, false);
        while !self.folder.join(file).exists() {
            sleep(Duration::from_millis(5));
        }
        sleep(Duration::from_millis(u64::from(std::process::id() % 100)));
        run
    }

    /// Compares all that is saved: dropout, Adam's moments and the order of the samples were restored.
    fn compare(&self, file: &str, other: &str) {
        assert_eq!(saved(self.folder.join(file)), saved(self.folder.join(other)));
    }
}

#[test]
fn a_killed_run_goes_on_to_the_same_parameters() {
    let training = Training::new("killed", "--micro-batch-size 4 --learning-rate-decay cosine");
    training.finish("whole", false);
    let mut run = training.begun("killed");
    run.kill().expect("killed");
    run.wait().expect("gone");
    training.finish("killed", true);
    training.compare("whole", "killed");
    let left = names(&training.folder);
    let beside = left.iter().filter(|name| name.starts_with('.')).count();
    assert!(beside <= 1, "at most the file that was being written: {left:?}");
}

#[test]
fn a_run_that_is_told_to_stop_does_so_after_its_step_and_goes_on() {
    for (name, more) in [
        ("stopped", "--micro-batch-size 4"),
        ("stopped-stages", "--stages 2 --num-micro-batches 3 --learning-rate-decay linear"),
    ] {
        let training = Training::new(name, more);
        training.finish("whole", false);
        let mut run = training.begun("stopped");
        let kill = format!("kill -TERM {}", run.id());
        assert!(Process::new("sh").args(["-c", &kill]).status().expect("a shell").success());
        let mut told = String::new();
        run.stderr.take().expect("a pipe").read_to_string(&mut told).expect("text");
        assert_eq!(run.wait().expect("an end").code(), Some(143), "{told}");
        assert!(told.contains("finishing the step"), "{told}");
        assert!(told.contains("stopped; resume with\n  "), "{told}");
        training.finish("stopped", true);
        training.compare("whole", "stopped");
        assert_eq!(names(&training.folder), ["stopped", "text", "whole"]);
    }
}
