//! `brimful evaluate`: metrics of a model on data.

use std::fs;
use std::path::Path;

use crate::program::{complains, folder, lines, run};
use brimful::save;
use serde_json::Value;

const CLOSE: f64 = 1e-6;

fn number(line: &Value, key: &str) -> f64 {
    line[key].as_f64().unwrap_or_else(|| panic!("{key} of {line}"))
}

/// Returns the metrics of an evaluation.
fn evaluated(arguments: &str) -> Value {
    lines(&format!("evaluate --device cpu --json {arguments}")).remove(0)
}

/// Returns the test of a training's last epoch.
fn trained(arguments: &str) -> Value {
    let train = format!("train --device cpu --json {arguments}");
    lines(&train).into_iter().rfind(|line| line["test_loss"].is_f64()).expect("an epoch")
}

fn assert_alike(found: &Value, trained: &Value) {
    for (key, tested) in [("loss", "test_loss"), ("accuracy", "test_accuracy")] {
        let (found, expected) = (number(found, key), number(trained, tested));
        assert!((found - expected).abs() < CLOSE, "{key}: {found} and {expected}");
    }
}

#[test]
fn images_are_judged_as_the_last_test_of_their_training() {
    let weights = folder("evaluate-images").join("mlp.safetensors").display().to_string();
    let last = trained(&format!("--epochs 2 --micro-batch-size 64 --save {weights}"));
    let found = evaluated(&format!("--weights {weights}"));
    assert_alike(&found, &last);
    assert_eq!((&found["samples"], found.get("perplexity")), (&360.into(), None));
    let all = evaluated(&format!("--weights {weights} --all --micro-batch-size 100"));
    assert_eq!(all["samples"], 1797);
    let said = "loss .* accuracy .* %  of 360 samples\n";
    run(&format!("evaluate --device cpu --weights {weights}"))
        .success()
        .stdout(crate::program::like(said));
}

#[test]
fn weights_that_are_no_numbers_are_told_in_words_of_the_program() {
    let weights = folder("evaluate-no-numbers").join("mlp.safetensors");
    trained(&format!("--max-steps 1 --save {}", weights.display()));
    let (mut tensors, metadata) = crate::program::saved(&weights);
    for (_, tensor) in &mut tensors {
        let _ = tensor.fill_(f64::NAN);
    }
    save::write(&weights, &tensors, &metadata).expect("written");
    let evaluate = format!("evaluate --device cpu --weights {}", weights.display());
    complains(&evaluate, 1, "the weights are no numbers that a model can have: was its training?");
}

#[test]
fn a_folder_is_judged_before_and_after_its_training_and_with_an_adapter() {
    let folder = folder("evaluate-folder");
    let place = |name: &str| folder.join(name).display().to_string();
    fs::create_dir(folder.join("tiny")).expect("a folder");
    let config =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/tiny-llama/config.json");
    fs::copy(config, folder.join("tiny/config.json")).expect("copied");
    let data = format!("--data {} --sequence 16", crate::program::text(&folder));
    let train =
        format!("{data} --batch-size 8 --micro-batch-size 4 --epochs 1 --learning-rate 0.01");
    let base = place("base");
    let last = trained(&format!("--model {} --from-scratch {train} --save {base}", place("tiny")));
    let found = evaluated(&format!("--model {base} {data}"));
    assert_alike(&found, &last);
    let perplexity = number(&found, "loss").exp();
    assert!((number(&found, "perplexity") - perplexity).abs() < CLOSE, "{found}");
    let tokens = number(&found, "samples") * 16.0;
    assert_eq!(number(&found, "targets"), tokens);

    let adapter = place("adapter");
    let last = trained(&format!("--model {base} --lora 2 {train} --save {adapter}"));
    assert_alike(&evaluated(&format!("--model {base} --adapter {adapter} {data}")), &last);
    for (arguments, complaint) in [
        ("", "no weights: give --weights FILE, or --model FOLDER"),
        (
            &*format!("--model {base} --weights {base}/model.safetensors"),
            "a --model folder has its own weights",
        ),
        (&*format!("--model {base}"), "a model of a folder needs text"),
    ] {
        complains(&format!("evaluate --device cpu {arguments}"), 2, complaint);
    }
}
