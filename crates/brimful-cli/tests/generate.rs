//! `brimful generate`: text by a GPT that was trained before.

mod program;

use std::path::Path;

use predicates::prelude::*;
use program::{brimful, folder};

fn trained(folder: &Path) -> String {
    let weights = folder.join("gpt.safetensors").display().to_string();
    let text = program::text(folder);
    brimful()
        .args("train --model gpt --device cpu --epochs 2 --batch-size 8 --micro-batch 8".split(' '))
        .args(["--data", &text, "--save", &weights])
        .assert()
        .success();
    weights
}

fn generated(weights: &str, arguments: &str) -> String {
    let run = brimful()
        .args(["generate", "--device", "cpu", "--weights", weights, "--prompt", "A stage "])
        .args(arguments.split(' '))
        .assert()
        .success();
    String::from_utf8(run.get_output().stdout.clone()).expect("text")
}

#[test]
fn the_same_choice_makes_the_same_text() {
    let weights = trained(&folder("generate"));
    // Longer than the model's context of 64.
    let greedy = generated(&weights, "--tokens 80 --temperature 0");
    assert!(greedy.starts_with("A stage ") && greedy.ends_with('\n'), "{greedy}");
    assert!(greedy.chars().count() > 40, "{greedy}");
    assert_eq!(generated(&weights, "--tokens 80 --temperature 0 --seed 5"), greedy);
    assert_eq!(generated(&weights, "--tokens 80 --top-k 1"), greedy);
    let drawn = generated(&weights, "--tokens 80 --temperature 1.5 --seed 1");
    assert_eq!(generated(&weights, "--tokens 80 --temperature 1.5 --seed 1"), drawn);
    assert_ne!(generated(&weights, "--tokens 80 --temperature 1.5 --seed 2"), drawn);

    for (arguments, complaint) in [
        ("--model gpt2", "was trained as --model gpt, not gpt2"),
        ("--temperature nan", "--temperature NaN: give it a number from 0 on"),
    ] {
        let mut generate = brimful();
        generate.args(["generate", "--device", "cpu", "--weights", &weights]);
        let run = generate.args(arguments.split(' ')).assert().code(2);
        run.stdout("").stderr(predicate::str::contains(complaint));
    }
}

#[test]
fn weights_of_something_else_are_wrong_use() {
    let folder = folder("generate-wrong");
    let weights = folder.join("mlp.safetensors");
    let train = "train --device cpu --epochs 1 --save";
    brimful().args(train.split(' ')).arg(&weights).assert().success();
    let mut generate = brimful();
    let run = generate.args(["generate", "--device", "cpu", "--weights"]).arg(&weights);
    let run = run.assert().code(2);
    run.stderr(predicate::str::contains("has no weights of a gpt: generate needs some\n"));
}
