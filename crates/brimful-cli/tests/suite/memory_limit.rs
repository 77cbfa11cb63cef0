//! A memory limit holds however a run begins.

use crate::program::{brimful, folder};

/// Returns whether each limit suffices for a new run, and for a resumed one.
fn enough(name: &str, limits: &[&str], more: &str) -> Vec<(bool, bool)> {
    let saved = folder(name).join("run.safetensors").display().to_string();
    let train = |flags: String| {
        // Without this, a model that does not fit would be offloaded.
        let line =
            format!("train --device cpu --micro-batch-size 16 --offload none {more} {flags}");
        brimful().args(line.split_whitespace()).ok().is_ok()
    };
    assert!(train(format!("--epochs 1 --save {saved}")));
    let runs = limits.iter().map(|limit| {
        let anew = train(format!("--epochs 1 --memory-limit {limit}"));
        (anew, train(format!("--epochs 2 --memory-limit {limit} --resume {saved}")))
    });
    runs.collect()
}

#[test]
fn a_limit_that_is_too_small_from_the_start_is_too_small_after_a_resume() {
    // Adam's state does not fit in the smaller limits.
    let enough = enough("resume-whole", &["2100kB", "2600kB", "3200kB", "8MB"], "");
    assert_eq!(enough, [(false, false), (false, false), (false, false), (true, true)]);
}

#[test]
fn so_it_is_in_stages() {
    // No limit is close to what a stage needs: the cut is measured, and may differ between runs.
    let enough = enough("resume-stages", &["1200kB", "2100kB", "8MB"], "--stages 2");
    assert_eq!(enough, [(false, false), (false, false), (true, true)]);
}
