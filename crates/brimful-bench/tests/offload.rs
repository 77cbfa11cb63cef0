//! `brimful-bench offload` as programs meet it: where the stages of a GPT live, and what that takes.

mod program;

use serde_json::Value;

/// A GPT whose table of words has most of its parameters, in arenas.
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
    // All on the device takes 19 MB, most of it the table with its f32 sums, their gradients and AdamW's state.
    let partly = within("18MB");
    assert!(partly["peak_bytes"].as_u64() <= Some(18_000_000), "{partly}");
    let stages = partly["stages"].as_u64().expect("a number");
    assert!((1..stages).contains(&at_home(&partly)), "{partly}");
    assert!(partly["plan"].as_str().is_some_and(|plan| plan.contains("at home")), "{partly}");
    let whole = within("200MB");
    assert_eq!(at_home(&whole), 0, "{whole}");
}
