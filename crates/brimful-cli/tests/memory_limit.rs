//! A memory limit is kept however a run begins.

mod program;

use program::{brimful, folder};

/// Whether each limit is enough for a run that begins anew, and for one that goes on.
fn enough(name: &str, limits: &[&str], more: &[&str]) -> Vec<(bool, bool)> {
    let saved = folder(name).join("run.safetensors");
    let saved = saved.to_str().expect("a path");
    let train = |epochs: &str, arguments: &[&str]| {
        let mut run = brimful();
        run.args(["train", "--device", "cpu", "--micro-batch", "16", "--epochs", epochs]);
        // Else what does not fit would live on the host.
        run.args(["--offload", "none"]);
        run.args(more).args(arguments).ok().is_ok()
    };
    assert!(train("1", &["--save", saved]));
    let runs = limits.iter().map(|limit| {
        let limit = ["--memory-limit", limit];
        (train("1", &limit), train("2", &[&limit[..], &["--resume", saved]].concat()))
    });
    runs.collect()
}

#[test]
fn a_limit_that_is_too_small_from_the_start_is_too_small_after_a_resume() {
    // Adam's state is what does not fit in the smaller ones.
    let enough = enough("resume-whole", &["2100kB", "2600kB", "3200kB", "8MB"], &[]);
    assert_eq!(enough, [(false, false), (false, false), (false, false), (true, true)]);
}

#[test]
fn so_it_is_in_stages() {
    // None near what a stage needs: where the model is cut is measured, and may be elsewhere next time.
    let enough = enough("resume-stages", &["1200kB", "2100kB", "8MB"], &["--stages", "2"]);
    assert_eq!(enough, [(false, false), (false, false), (true, true)]);
}
