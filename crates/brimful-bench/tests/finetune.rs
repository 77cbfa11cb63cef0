//! `brimful-bench finetune` as programs meet it: the same losses wherever the model lives.

mod program;

use std::fs;

const TINY: &str = "../../examples/tiny-llama";

/// Losses of about 4 in bf16 are told apart no closer: at home a micro-batch's is such a number.
const BF16_LOSS: f64 = 0.02;

/// A small work on a folder's model; what is said besides.
fn finetune(more: &str) -> assert_cmd::Command {
    let mut bench = program::bench();
    bench.args(["finetune", "--device", "cpu", "--sequence", "8", "--batch-size", "4"]);
    bench.args(["--micro-batch", "2", "--repeats", "1"]).args(more.split(' '));
    bench
}

#[test]
fn losses_are_the_same_on_the_device_and_at_home() {
    for lora in ["", " --lora 2"] {
        let folder = "../brimful-models/tests/pretrained/llama_grouped";
        let (rows, _) =
            program::rows(finetune(&format!("--model {folder} --homes device,host{lora}")));
        let names: Vec<_> = rows.iter().map(|row| row["contestant"].as_str()).collect();
        assert_eq!(names, ["brimful, on the card", "brimful, at home"].map(Some));
        for row in &rows {
            assert!(row["tokens_per_s"].as_f64() > Some(0.0), "{row}");
            assert!(row["seconds_load"].as_f64() > Some(0.0), "{row}");
        }
        for loss in ["first_loss", "last_loss"] {
            let [on, home] = [0, 1].map(|at| rows[at][loss].as_f64().expect("a loss"));
            assert!((on - home).abs() < BF16_LOSS, "{loss}: {on} and {home}");
        }
    }
}

#[test]
fn a_config_alone_is_enough_from_scratch() {
    let (rows, _) = program::rows(finetune(&format!("--model {TINY} --from-scratch")));
    assert_eq!(rows.len(), 1);
    assert!(rows[0]["seconds_load"].is_null(), "{}", rows[0]);
}

#[test]
fn what_cannot_be_is_refused_before_anything_is_built() {
    let error = |more: &str| {
        let output = finetune(more).assert().failure().get_output().stderr.clone();
        String::from_utf8(output).expect("text")
    };
    let empty = program::folder("finetune");
    fs::remove_dir_all(&empty).expect("it was made");
    for (more, words) in [
        (format!("--model {TINY}"), "model.safetensors"),
        (format!("--model {}", empty.display()), "config.json"),
        (format!("--model {TINY} --from-scratch --memory-limit 1GB"), "--device cuda"),
    ] {
        let said = error(&more);
        assert!(said.contains(words), "{more}: {said}");
    }
    let mut long = program::bench();
    long.args(["finetune", "--device", "cpu", "--from-scratch", "--model", TINY]);
    let output = long.args(["--sequence", "257"]).assert().failure().get_output().stderr.clone();
    let said = String::from_utf8(output).expect("text");
    assert!(said.contains("from 1 to 256 tokens"), "{said}");
}
