//! `brimful predict`: the answers of a model that was trained before.

mod program;

use std::fs;
use std::path::Path;

use brimful::save;
use predicates::prelude::*;
use program::{folder, lines, run};

/// Trains an mlp for two epochs, and gives its file and the accuracy of its last test.
fn trained(folder: &Path) -> (String, f64) {
    let weights = folder.join("mlp.safetensors").display().to_string();
    let train = "train --device cpu --epochs 2 --micro-batch 64 --json --save";
    let last = lines(&format!("{train} {weights}")).pop().expect("a line");
    (weights, last["test_accuracy"].as_f64().expect("a number"))
}

#[test]
fn the_answers_are_as_right_as_the_training_said() {
    let folder = folder("predict");
    let (weights, accuracy) = trained(&folder);
    let predict = "predict --device cpu --micro-batch 50 --json --weights";
    let answers = lines(&format!("{predict} {weights}"));
    assert_eq!(answers.len(), 360);
    let right = answers.iter().filter(|answer| answer["class"] == answer["target"]).count();
    assert_eq!(right as f64 / answers.len() as f64, accuracy);
    assert!(answers.iter().enumerate().all(|(number, answer)| answer["index"] == number));
    let probability = |answer: &serde_json::Value| answer["probability"].as_f64();
    assert!(answers.iter().all(|a| probability(a).is_some_and(|p| (0.1..=1.0).contains(&p))));

    let file = folder.join("answers.jsonl");
    let within = "predict --device cpu --model mlp --memory-limit 8MiB --weights";
    let percent = format!("{right} of 360 are right: {:.1} %\n", accuracy * 100.0);
    run(&format!("{within} {weights} -o {}", file.display())).success().stdout(percent);
    assert_eq!(fs::read_to_string(file).expect("written").lines().count(), 360);
}

#[test]
fn weights_that_do_not_go_with_the_model_or_the_data_are_wrong_use() {
    let folder = folder("predict-wrong");
    let (weights, _) = trained(&folder);
    let text = program::text(&folder);
    for (arguments, complaint) in [
        ("--model resnet18", "was trained as --model mlp, not resnet18"),
        (&format!("--data {text}"), "for text there is brimful generate"),
        ("--output /no/such/folder/file", "there is no folder /no/such/folder"),
    ] {
        let refused = run(&format!("predict --device cpu --weights {weights} {arguments}")).code(2);
        refused.stdout("").stderr(
            predicate::str::starts_with("brimful: ")
                .and(predicate::str::contains(complaint))
                .and(predicate::function(|text: &str| text.lines().count() == 1)),
        );
    }
}

#[test]
fn weights_that_are_no_numbers_have_no_answers() {
    let (weights, _) = trained(&folder("predict-no-numbers"));
    let (mut tensors, metadata) = save::read(&weights).expect("a run");
    for (_, tensor) in &mut tensors {
        let _ = tensor.fill_(f64::NAN);
    }
    save::write(&weights, &tensors, &metadata).expect("written");
    let broken = run(&format!("predict --device cpu --weights {weights}")).code(1);
    broken.stdout("").stderr(predicate::str::contains("numbers that are not finite"));
}
