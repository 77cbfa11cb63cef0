//! Tests of `brimful-bench offload`: placement of a GPT's stages, and its memory.

use serde_json::Value;

/// Runs a GPT in arenas.
fn row(shape: &str, offload: &str) -> Value {
    let gpt = format!("offload --device cpu {shape} --heads 2 --sequence 4 --sequences 1");
    crate::program::rows(&format!("{gpt} --counts 2 --repeats 1 --offload {offload}")).0.remove(0)
}

#[test]
fn planned_offload_keeps_the_limit_and_what_fits_stays_on_the_device() {
    let on_host = |row: &Value| row["offloaded_stages"].as_u64().expect("a number");
    let host = row("--layers 2 --width 16", "host");
    assert_eq!(on_host(&host), 4, "{host}");
    // The whole model takes 150 MB on the device, of which blocks have more than the embedding.
    let deep = "--layers 100 --width 64";
    let within = |limit: &str| row(deep, &format!("auto --memory-limit {limit}"));
    let partly = within("110MB");
    assert!(partly["peak_bytes"].as_u64() <= Some(110_000_000), "{partly}");
    let stages = partly["stages"].as_u64().expect("a number");
    assert!((1..stages).contains(&on_host(&partly)), "{partly}");
    assert!(
        partly["plan"].as_str().is_some_and(|plan| plan.contains("offloaded to the host")),
        "{partly}"
    );
    let whole = within("400MB");
    assert_eq!(on_host(&whole), 0, "{whole}");
}
