//! Tests of `brimful-bench finetune`: equal losses on the device and offloaded.

use std::fs;

use crate::program::{contestants, refused, rows};

const TINY: &str = "../../examples/tiny-llama";

/// Tolerance of losses near 4 in bf16: an offloaded micro-batch's loss has that precision.
const BF16_LOSS: f64 = 0.02;

/// Small work on a folder's model.
const FINETUNE: &str =
    "finetune --device cpu --sequence 8 --batch-size 4 --micro-batch-size 2 --repeats 1";

#[test]
fn losses_are_equal_on_the_device_and_offloaded() {
    for lora in ["", " --lora 2"] {
        let folder = "../brimful-models/tests/pretrained/llama_grouped";
        let (rows, _) = rows(&format!("{FINETUNE} --model {folder} --offload device,host{lora}"));
        assert_eq!(contestants(&rows), ["brimful, on the GPU", "brimful, offloaded"]);
        for row in &rows {
            assert!(row["tokens_per_s"].as_f64() > Some(0.0), "{row}");
            assert!(row["seconds_load"].as_f64() > Some(0.0), "{row}");
        }
        for loss in ["first_loss", "last_loss"] {
            let [on, on_host] = [0, 1].map(|at| rows[at][loss].as_f64().expect("a loss"));
            assert!((on - on_host).abs() < BF16_LOSS, "{loss}: {on} and {on_host}");
        }
    }
}

#[test]
fn a_config_alone_is_enough_from_scratch() {
    let (rows, _) = rows(&format!("{FINETUNE} --model {TINY} --from-scratch"));
    assert_eq!(rows.len(), 1);
    assert!(rows[0]["seconds_load"].is_null(), "{}", rows[0]);
}

#[test]
fn what_cannot_be_is_refused_before_anything_is_built() {
    let empty = crate::program::folder("finetune");
    fs::remove_dir_all(&empty).expect("it was made");
    for (model, words) in [
        (TINY, "model.safetensors"),
        (&empty.display().to_string(), "config.json"),
        (&format!("{TINY} --from-scratch --memory-limit 1GB"), "--device cuda"),
    ] {
        refused(&format!("{FINETUNE} --model {model}"), words);
    }
    let long = format!("finetune --device cpu --from-scratch --model {TINY} --sequence 257");
    refused(&long, "from 1 to 256 tokens");
}
