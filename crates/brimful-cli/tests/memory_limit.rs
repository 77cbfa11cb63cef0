//! A memory limit is kept however a run begins.

mod program;

use program::{brimful, folder};

/// Adam's state is what does not fit in the smaller ones; the last is enough.
const LIMITS: [&str; 4] = ["2100kB", "2600kB", "3200kB", "8MB"];

/// Whether each limit is enough for a run that begins anew, and for one that goes on.
fn enough(name: &str, more: &[&str]) -> Vec<(bool, bool)> {
    let saved = folder(name).join("run.safetensors");
    let saved = saved.to_str().expect("a path");
    let train = |epochs: &str, arguments: &[&str]| {
        let mut run = brimful();
        run.args(["train", "--device", "cpu", "--micro-batch", "16", "--epochs", epochs]);
        run.args(more).args(arguments).ok().is_ok()
    };
    assert!(train("1", &["--save", saved]));
    let runs = LIMITS.map(|limit| {
        let limit = ["--memory-limit", limit];
        (train("1", &limit), train("2", &[&limit[..], &["--resume", saved]].concat()))
    });
    runs.to_vec()
}

#[test]
fn a_limit_that_is_too_small_from_the_start_is_too_small_after_a_resume() {
    let enough = enough("resume-whole", &[]);
    assert_eq!(enough.last(), Some(&(true, true)));
    assert_eq!(enough[..3], [(false, false); 3]);
}

#[test]
fn so_it_is_in_stages() {
    let enough = enough("resume-stages", &["--stages", "2"]);
    assert_eq!(enough.last(), Some(&(true, true)));
    assert!(enough.iter().all(|(anew, again)| anew == again), "{enough:?}");
}
