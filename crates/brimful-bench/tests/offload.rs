//! Tests of `brimful-bench offload`: placement of a GPT's stages, and its memory.

mod program;

use serde_json::Value;

/// Runs a GPT in arenas; its embedding has most of its parameters.
fn row(offload: &str) -> Value {
    let gpt = "offload --device cpu --layers 2 --width 16 --heads 2 --sequence 4 --sequences 1";
    program::rows(&format!("{gpt} --counts 2 --repeats 1 --offload {offload}")).0.remove(0)
}

#[test]
fn planned_offload_keeps_the_limit_and_what_fits_stays_on_the_device() {
    let on_host = |row: &Value| row["offloaded_stages"].as_u64().expect("a number");
    let host = row("host");
    assert_eq!(on_host(&host), 4, "{host}");
    let within = |limit: &str| row(&format!("auto --memory-limit {limit}"));
    // The whole model takes 19 MB on the device, mostly the embedding with its f32 sums, gradients and AdamW's
    // state.
    let partly = within("18MB");
    assert!(partly["peak_bytes"].as_u64() <= Some(18_000_000), "{partly}");
    let stages = partly["stages"].as_u64().expect("a number");
    assert!((1..stages).contains(&on_host(&partly)), "{partly}");
    assert!(
        partly["plan"].as_str().is_some_and(|plan| plan.contains("offloaded to the host")),
        "{partly}"
    );
    let whole = within("200MB");
    assert_eq!(on_host(&whole), 0, "{whole}");
}
