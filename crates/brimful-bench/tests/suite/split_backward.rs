//! Tests of `brimful-bench split-backward`: a split backward gives the gradients of the whole one.

use std::fs;

use crate::program::{refused, rows, run, tables};
use predicates::prelude::*;
use serde_json::{Value, json};

/// Smallest stages, in short turns.
const SPLIT: &str = "split-backward --device cpu --gpt 1x64x8 --micro-batch-size 2 --image 64";

#[test]
fn each_model_has_a_row_whose_split_backward_gives_the_gradients_of_the_whole() {
    let models = "mlp,gpt,resnet18,unet:2x4,amoebanet:3x16";
    let (rows, environment) = rows(&format!("{SPLIT} --model {models} --dtype f64 --repeats 2"));
    let found: Vec<_> = rows.iter().filter_map(|row| row["model"].as_str()).collect();
    assert_eq!(found, models.split(',').collect::<Vec<_>>());
    assert_eq!(environment["threads"], 1);
    for row in &rows {
        assert!(row["gradient_difference"].as_f64() <= Some(1e-10), "{row}");
        let split = ["input_seconds", "weight_seconds", "ratio"];
        for key in ["forward_seconds", "whole_seconds", "engine_seconds"].into_iter().chain(split) {
            assert!(row[key].as_f64() > Some(0.0), "{key} in {row}");
        }
        assert_eq!((&row["batch"], &row["repeats"]), (&2.into(), &2.into()));
    }
}

#[test]
fn people_read_a_line_and_a_table_of_what_a_folder_keeps() {
    let folder = crate::program::folder("split-backward");
    let into = folder.display();
    run(&format!("{SPLIT} --model gpt --repeats 1 --into {into}"))
        .success()
        .stdout(predicate::str::contains("shape 1×64×8").and(predicate::str::contains(", ratio ")));
    tables(&format!("{into}/ours.jsonl")).success().stdout(
        predicate::str::contains("GPT 1×64×8, f32 on cpu, micro-batch 2")
            .and(predicate::str::contains("split : whole")),
    );
}

#[test]
fn what_cannot_be_measured_is_refused() {
    refused(&format!("{SPLIT} --dtype tf32"), "use --dtype f32 on the CPU");
    refused(&format!("{SPLIT} --repeats 0"), "give a whole number from 1 on");
}

#[test]
fn the_split_backward_of_a_peer_stands_beside_ours() {
    let rows = crate::program::folder("split-backward-beside").join("rows.jsonl");
    let row = |contestant: &str, split: f64| {
        json!({
            "bench": "split_backward", "contestant": contestant, "model": "gpt", "shape": "1×64×8", "dtype": "f32",
            "device": "cpu", "micro_batch": 2, "whole_seconds": 0.01, "split_seconds": split,
            "ratio": split / 0.01,
        })
    };
    let lines = [row("brimful", 0.01), row("torch.distributed.pipelining", 0.03)];
    fs::write(&rows, lines.map(|row| format!("{row}\n")).concat()).expect("written");
    let compared = tables(&format!("--json {}", rows.display())).success();
    let output = compared.get_output();
    let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let [ours, peer] = [&report["rows"][0], &report["rows"][1]];
    assert_eq!((&ours["whole_ms"], &ours["over_peer"]), (&10.0.into(), &3.0.into()));
    assert!(peer["over_peer"].is_null() && peer["ratio"] == 3.0, "{peer}");
}
