//! `brimful predict`: predictions of a trained model.

use std::fs;
use std::sync::LazyLock;

use crate::program::{complains, folder, lines, refused, run};
use brimful::save;

/// File of an mlp trained for two epochs, and the accuracy of its last test.
static TRAINED: LazyLock<(String, f64)> = LazyLock::new(|| {
    let weights = folder("predict-trained").join("mlp.safetensors").display().to_string();
    let train = "train --device cpu --epochs 2 --micro-batch-size 64 --json --save";
    let last = lines(&format!("{train} {weights}")).pop().expect("a line");
    (weights, last["test_accuracy"].as_f64().expect("a number"))
});

#[test]
fn the_answers_are_as_right_as_the_training_said() {
    let (weights, accuracy) = &*TRAINED;
    let predict = "predict --device cpu --micro-batch-size 50 --json --weights";
    let answers = lines(&format!("{predict} {weights}"));
    assert_eq!(answers.len(), 360);
    let right = answers.iter().filter(|answer| answer["class"] == answer["target"]).count();
    assert_eq!(right as f64 / answers.len() as f64, *accuracy);
    assert!(answers.iter().enumerate().all(|(number, answer)| answer["index"] == number));
    let probability = |answer: &serde_json::Value| answer["probability"].as_f64();
    assert!(answers.iter().all(|a| probability(a).is_some_and(|p| (0.1..=1.0).contains(&p))));

    let file = folder("predict").join("answers.jsonl");
    let within = "predict --device cpu --model mlp --memory-limit 8MiB --weights";
    let percent = format!("{right} of 360 are correct: {:.1} %\n", accuracy * 100.0);
    let output = format!("{within} {weights} -o {}", file.display());
    run(&output).success().stdout(percent);
    assert_eq!(fs::read_to_string(&file).expect("written").lines().count(), 360);
    fs::write(&file, "mine").expect("written");
    complains(&output, 2, "exists already: name another, or give --overwrite");
    assert_eq!(fs::read_to_string(&file).expect("still there"), "mine");
    run(&format!("{output} --overwrite")).success();
    assert_eq!(fs::read_to_string(&file).expect("written").lines().count(), 360);
}

#[test]
fn weights_that_do_not_go_with_the_model_the_data_or_the_command_are_wrong_use() {
    let (weights, _) = &*TRAINED;
    let text = crate::program::text(&folder("predict-wrong"));
    for (arguments, complaint) in [
        ("--model resnet18", "was trained as --model mlp, not resnet18"),
        (&format!("--data {text}"), "for text use brimful generate"),
        ("--output /no/such/folder/file", "there is no folder /no/such/folder"),
    ] {
        let predict = format!("predict --device cpu --weights {weights} {arguments}");
        complains(&predict, 2, complaint).stdout("");
    }
    let generate = format!("generate --device cpu --weights {weights}");
    complains(&generate, 2, "has no weights of a gpt, which generate needs\n");
}

#[test]
fn weights_that_are_no_numbers_have_no_answers() {
    let (mut tensors, metadata) = save::read(&TRAINED.0).expect("a run");
    for (_, tensor) in &mut tensors {
        let _ = tensor.fill_(f64::NAN);
    }
    let weights = folder("predict-no-numbers").join("mlp.safetensors");
    save::write(&weights, &tensors, &metadata).expect("written");
    let predict = format!("predict --device cpu --weights {}", weights.display());
    refused(&predict, 1, "outputs are not finite").stdout("");
}

/// The training images beside the test images may be other ones; the scale of the model's is in its file.
#[test]
fn pixels_are_normalised_as_those_that_the_model_was_trained_on() {
    let (weights, _) = &*TRAINED;
    let (tensors, mut metadata) = save::read(weights).expect("a run");
    let scale = metadata["pixels"].clone();
    let (mean, deviation) = scale.split_once(' ').expect("two numbers");
    let [mean, deviation]: [f64; 2] =
        [mean, deviation].map(|number| number.parse().expect("a number"));
    assert!(mean > 4.0 && mean < 6.0 && deviation > 5.0 && deviation < 7.0, "{scale}");
    metadata.insert("pixels".into(), format!("{} {}", mean + 50.0, deviation));
    let moved = folder("predict-moved").join("mlp.safetensors");
    save::write(&moved, &tensors, &metadata).expect("written");
    let answers =
        |weights: &str| lines(&format!("predict --device cpu --json --weights {weights}"));
    assert_ne!(answers(&moved.display().to_string()), answers(weights));
}
