//! `brimful generate`: text from a trained language model, in a file or a folder.

use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use crate::program::{brimful, complains, folder, like, refused, run, stdout};

fn generated(weights: &str, arguments: &str) -> String {
    let mut generate = brimful();
    generate.args(["generate", "--device", "cpu", "--weights", weights, "--prompt", "A stage "]);
    stdout(&generate.args(arguments.split(' ')).assert().success())
}

#[test]
fn the_same_choice_makes_the_same_text() {
    let folder = folder("generate");
    let weights = folder.join("gpt.safetensors").display().to_string();
    let text = crate::program::text(&folder);
    let train = "train --model gpt --device cpu --epochs 2 --batch-size 8 --micro-batch-size 8";
    run(&format!("{train} --data {text} --save {weights}")).success();
    // Longer than the model's context of 64 tokens.
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
        ("--temperature nan", "--temperature NaN: give a number from 0 on"),
    ] {
        let generate = format!("generate --device cpu --weights {weights} {arguments}");
        refused(&generate, 2, complaint).stdout("");
    }
}

/// Makes a folder with only the config.json of the repository's tiny Llama.
fn tiny_llama(folder: &Path) -> String {
    let tiny = folder.join("tiny");
    fs::create_dir_all(&tiny).expect("a folder");
    let config =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/tiny-llama/config.json");
    fs::copy(config, tiny.join("config.json")).expect("copied");
    tiny.display().to_string()
}

/// Trains a folder's model on the text, for two steps or as many as requested.
fn tune(folder: &Path, model: &str, save: &str, more: &str) -> String {
    let saved = folder.join(save).display().to_string();
    let text = crate::program::text(folder);
    let steps = if more.contains("--max-steps") { "" } else { "--max-steps 2" };
    let train = "train --device cpu --batch-size 4 --micro-batch-size 2 --sequence 16";
    run(&format!("{train} --data {text} --model {model} --save {saved} {more} {steps}")).success();
    saved
}

/// Folder of a model trained from scratch, with its best version beside it.
static BASE: LazyLock<String> = LazyLock::new(|| {
    let folder = folder("generate-base");
    tune(&folder, &tiny_llama(&folder), "base", "--from-scratch --keep best")
});

fn written(arguments: &str) -> String {
    let generate = "generate --device cpu --tokens 20 --temperature 0 --prompt x";
    stdout(&run(&format!("{generate} {arguments}")).success())
}

fn files(folder: &str) -> Vec<String> {
    crate::program::names(Path::new(folder))
}

#[test]
fn a_folders_model_is_trained_saved_and_goes_on_with_a_text() {
    let (folder, base) = (folder("generate-folder"), &*BASE);
    assert_eq!(files(base), ["config.json", "model.safetensors"]);
    assert_eq!(files(&format!("{base}.best")), files(base));

    let whole = written(&format!("--model {base}"));
    assert!(whole.starts_with('x') && whole.ends_with('\n'), "{whole}");
    assert_eq!(written(&format!("--model {base} --from-host")), whole);

    let fast = "--learning-rate 0.1";
    let adapter = tune(&folder, base, "adapter", &format!("--lora 4:8 --offload all {fast}"));
    assert_eq!(files(&adapter), ["adapter_config.json", "adapter_model.safetensors"]);
    let merged = tune(&folder, base, "merged", &format!("--lora 4:8 --merge --offload all {fast}"));
    assert_eq!(files(&merged), ["config.json", "model.safetensors"]);
    let with_adapter = format!("--model {base} --adapter {adapter}");
    let adapted = written(&with_adapter);
    assert_ne!(adapted, whole, "LoRA has learnt something");
    assert_eq!(written(&format!("{with_adapter} --from-host")), adapted);
    assert_eq!(written(&format!("--model {merged}")), adapted);
}

#[test]
fn a_run_with_a_folders_model_goes_on_from_its_file() {
    let folder = folder("generate-resume");
    let whole = tune(&folder, &BASE, "whole.safetensors", "--lora 2 --max-steps 4");
    let half = tune(&folder, &BASE, "half.safetensors", "--lora 2");
    let rest = format!("--lora 2 --max-steps 4 --resume {half}");
    let rest = tune(&folder, &BASE, "rest.safetensors", &rest);
    assert_eq!(fs::read(whole).expect("read"), fs::read(rest).expect("read"));
}

/// Writes a file of conversations with answers of different lengths.
fn conversations(folder: &Path) -> String {
    let path = folder.join("chat.jsonl");
    let line = |number: usize| {
        let answer = "one more ".repeat(number % 4 + 1);
        format!(
            r#"{{"messages": [{{"role": "user", "content": "Count to {number}."}}, {{"role": "assistant", "content": "{answer}"}}]}}"#
        )
    };
    let lines: Vec<String> = (0..30).map(line).collect();
    fs::write(&path, lines.join("\n")).expect("written");
    path.display().to_string()
}

#[test]
fn answers_alone_are_learnt_the_same_however_the_conversations_are_cut() {
    let (base, chat) = (&*BASE, conversations(&folder("generate-chat")));
    let train = format!(
        "train --device cpu --batch-size 8 --sequence 64 --epochs 1 --dtype f64 --json --model {base} \
         --data {chat}"
    );
    let figures = |cut: &str| {
        let last = crate::program::lines(&format!("{train} {cut}")).pop().expect("an epoch");
        ["loss", "test_loss", "test_accuracy"].map(|key| last[key].as_f64().expect(key))
    };
    let whole = figures("--micro-batch-size 8");
    for cut in ["--micro-batch-size 1", "--replicas 2", "--offload all --num-micro-batches 3"] {
        for (found, expected) in figures(cut).iter().zip(whole) {
            assert!((found - expected).abs() < 1e-9, "{cut}: {found} and {expected}");
        }
    }
    let follow = format!("{train} --offload all --update-in-backward");
    refused(&follow, 2, "--update-in-backward needs a loss over all tokens");
}

#[test]
fn folders_that_do_not_do_are_wrong_use() {
    let folder = folder("generate-refused");
    let tiny = tiny_llama(&folder);
    let text = crate::program::text(&folder);
    let strange = folder.join("strange").display().to_string();
    fs::create_dir_all(&strange).expect("a folder");
    fs::write(format!("{strange}/config.json"), r#"{"model_type": "mamba"}"#).expect("written");
    let wordy = tiny_llama(&folder.join("wordy"));
    let train = format!("train --model {tiny} --from-scratch --data {text}");
    let others = folder.join("others").display().to_string();
    fs::create_dir_all(&others).expect("a folder");
    fs::write(format!("{others}/thesis.tex"), "mine").expect("written");
    let words = r#"{"added_tokens": [], "model": {"type": "WordLevel", "unk_token": "?", "vocab": {"?": 256}}}"#;
    fs::write(format!("{wordy}/tokenizer.json"), words).expect("written");
    let pieces = tiny_llama(&folder.join("pieces"));
    fs::write(format!("{pieces}/tokenizer.model"), "SentencePiece's own").expect("written");
    for (arguments, complaint) in [
        (
            format!("train --model {pieces} --from-scratch --data {text}"),
            "has tokenizer.model, but no tokenizer.json, which alone is read: make it with python3",
        ),
        (
            format!("train --model {wordy} --from-scratch --data {text}"),
            "its tokenizer has 257 tokens, but its model has a vocabulary of 256",
        ),
        (format!("train --model {tiny} --data {text}"), "model.safetensors"),
        (
            format!("train --model {strange} --data {text}"),
            "supported are gpt2, llama, mistral, qwen2",
        ),
        (format!("train --model {folder}/none", folder = folder.display()), "there is no folder"),
        (format!("train --model {tiny} --from-scratch"), "a model of a folder needs text"),
        (
            format!("{train} --sequence 300"),
            "--sequence 300 is longer than the 256 tokens that the model takes",
        ),
        (format!("{train} --save {tiny}"), "would overwrite what --model reads"),
        (format!("{train} --save {tiny} --overwrite"), "would overwrite what --model reads"),
        (format!("{train} --save {}", folder.display()), "would overwrite what --data reads"),
        (format!("{train} --save {others}"), "exists already: name another, or give --overwrite"),
        (format!("{train} --save {others} --overwrite"), "which would be lost"),
        (format!("{train} --save {tiny}2 --keep 3"), "--keep N is for a file of --save"),
        ("train --lora 4".into(), "--lora is for a model of a folder: give --model FOLDER"),
        ("train --lora four".into(), "give a rank from 1 on"),
        ("generate".into(), "give --weights FILE, or --model FOLDER"),
        (
            format!("generate --model {tiny} --weights {text}"),
            "a --model folder has its own weights",
        ),
    ] {
        refused(&arguments, 2, complaint).stdout("");
    }
}

/// A model may have more tokens than its tokenizer, for instance with a padded vocabulary.
#[test]
fn numbers_that_the_tokenizer_does_not_know_are_never_written() {
    let model = folder("generate-padded");
    for file in files(&BASE) {
        fs::copy(Path::new(&*BASE).join(&file), model.join(file)).expect("copied");
    }
    let words = r#"{"added_tokens": [], "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "unk_token": "?", "vocab": {"?": 0, "x": 1, "y": 2}}}"#;
    fs::write(model.join("tokenizer.json"), words).expect("written");
    let generate =
        format!("generate --device cpu --tokens 30 --prompt x --model {}", model.display());
    run(&generate).success().stdout(like(r"^x( [?xy]){30}\n$"));
}

#[test]
fn a_folder_says_how_its_model_writes_and_where_it_ends() {
    let folder = folder("generate-config");
    let model = folder.join("model");
    fs::create_dir(&model).expect("a folder");
    for file in files(&BASE) {
        fs::copy(Path::new(&*BASE).join(&file), model.join(file)).expect("copied");
    }
    let told = |settings: &str| {
        fs::write(model.join("generation_config.json"), settings).expect("written");
    };
    let generate =
        format!("generate --device cpu --tokens 20 --prompt x --model {}", model.display());
    let likeliest = written(&format!("--model {}", *BASE));
    told(r#"{"do_sample": false, "repetition_penalty": 1.05}"#);
    run(&generate)
        .success()
        .stdout(likeliest.clone())
        .stderr(like("generation_config.json's repetition_penalty 1.05 is not applied"));
    told(r#"{"do_sample": true, "top_k": 1}"#);
    run(&generate).success().stdout(likeliest.clone()).stderr("");
    // The first byte generated ends the text, as one of several end tokens.
    let first = likeliest.as_bytes()[1];
    told(&format!(r#"{{"do_sample": false, "eos_token_id": [255, {first}]}}"#));
    run(&generate).success().stdout("x\n");
    let long = "x".repeat(300);
    let generate_long =
        format!("generate --device cpu --tokens 1 --model {} --prompt {long}", model.display());
    let says = "the prompt has 300 tokens, and the model takes 256: it sees the last 256 alone";
    run(&generate_long).success().stderr(like(says));
    complains(&format!("{generate} --top-p 0"), 2, "--top-p 0: give a number above 0");
}
