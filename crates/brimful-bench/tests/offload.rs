//! Tests of `brimful-bench offload`: placement of a GPT's stages, and its memory.

mod program;

use serde_json::Value;

/// Runs a GPT in arenas; its embedding has most of its parameters.
fn row(homes: &str) -> Value {
    let gpt = "offload --device cpu --layers 2 --width 16 --heads 2 --sequence 4 --sequences 1";
    program::rows(&format!("{gpt} --counts 2 --repeats 1 --homes {homes}")).0.remove(0)
}

#[test]
fn planned_homes_keep_the_limit_and_what_fits_stays_on_the_device() {
    let at_home = |row: &Value| row["stages_at_home"].as_u64().expect("a number");
    let host = row("host");
    assert_eq!(at_home(&host), 4, "{host}");
    let within = |limit: &str| row(&format!("auto --memory-limit {limit}"));
    // The whole model takes 19 MB on the device, mostly the embedding with its f32 sums, gradients and AdamW's
    // state.
    let partly = within("18MB");
    assert!(partly["peak_bytes"].as_u64() <= Some(18_000_000), "{partly}");
    let stages = partly["stages"].as_u64().expect("a number");
    assert!((1..stages).contains(&at_home(&partly)), "{partly}");
    assert!(partly["plan"].as_str().is_some_and(|plan| plan.contains("at home")), "{partly}");
    let whole = within("200MB");
    assert_eq!(at_home(&whole), 0, "{whole}");
}
