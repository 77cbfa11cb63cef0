//! Comparison with `transformers` and PEFT, if `make transformers` has installed them: each side reads what the other
//! writes.

use std::env;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use brimful::nn::Lora;
use brimful::save::{self, Metadata};
use brimful_models::pretrained::{AdapterFolder, Pretrained};

use super::{
    FOLDERS, adapted_logits, answer, assert_read_and_trained, built, folder, logits, named,
    reference, reference_in, scratch, trained,
};

/// Returns the Python that has them. Without one, says so, and the test is skipped.
fn python(test: &str) -> Option<PathBuf> {
    let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cache")))?;
    let home = cache.join("brimful/transformers");
    if home.join("installed.txt").is_file() {
        return Some(home.join("bin/python"));
    }
    // Bypasses the test harness, which captures what is printed.
    let _ = writeln!(std::io::stderr(), "skipped: {test}: no transformers (make transformers)");
    None
}

/// Runs a script that is beside this file.
fn run(python: &Path, script: &str, argument: &Path) {
    let mut command = Command::new(python);
    command.arg(folder(script)).arg(argument);
    // Python makes no network requests, and does not load libraries from the compiler's path.
    command.env("HF_HUB_OFFLINE", "1").env_remove("LD_LIBRARY_PATH");
    let ended = command.output().expect("Python");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{script}: {said}");
}

#[test]
fn what_they_write_today_is_read_and_trained() {
    let Some(python) = python("what_they_write_today_is_read_and_trained") else { return };
    let folders = scratch("peers-wrote");
    run(&python, "make_reference.py", &folders);
    assert_read_and_trained(&folders);
}

#[test]
fn what_is_saved_they_load_with_the_same_logits() {
    let Some(python) = python("what_is_saved_they_load_with_the_same_logits") else { return };
    let folders = scratch("peers-read");
    for name in FOLDERS {
        save_with_answers(name, &folders.join(name));
    }
    run(&python, "check_saved.py", &folders);
}

/// Saves a trained model and an adapter for it, with their logits.
fn save_with_answers(name: &str, to: &Path) {
    std::fs::create_dir(to).expect("a folder");
    let tokens = reference(name)["tokens"].shallow_clone();
    let (store, model) = trained(&folder(name));
    let pretrained = Pretrained::open(folder(name)).expect("a folder");
    pretrained.save(to.join("model"), &named(&store)).expect("saved");

    let saved = Pretrained::open(to.join("model")).expect("a folder");
    let lora = Lora { alpha: 5.0, ..Lora::new(3) };
    let (store, adapted) = built(&saved, &saved.config().layers().lora(&lora));
    for (_, mut added) in named(&store).into_iter().filter(|(name, _)| Lora::is_adapter(name)) {
        // Random values replace the usual initialisation, with which an adapter changes nothing.
        let _ = tch::no_grad(|| added.normal_(0.0, 0.2));
    }
    saved.save_adapter(to.join("adapter"), &lora, &named(&store)).expect("saved");
    let answers = [
        ("logits".to_owned(), answer(&model, &tokens)),
        ("adapted".to_owned(), answer(&adapted, &tokens)),
        ("tokens".to_owned(), tokens),
    ];
    save::write(to.join("answers.safetensors"), &answers, &Metadata::new()).expect("written");
}

/// Kinds of adapters that make_adapters.py writes, each with the field that it is refused for, or without one if it
/// must give PEFT's logits.
const KINDS: [(&str, Option<&str>); 21] = [
    ("name", None),
    ("dotted", None),
    ("regex", None),
    ("all_linear", None),
    ("rslora", None),
    ("patterns", None),
    ("rslora_patterns", None),
    ("layers", None),
    ("excluded", None),
    ("gaussian", None),
    ("orthogonal", None),
    ("head", Some("target_modules means 'lm_head' too")),
    ("embeddings", Some("target_modules means '")),
    ("saved_modules", Some("modules_to_save")),
    ("bias_all", Some("bias is 'all'")),
    ("bias_lora", Some("bias is 'lora_only'")),
    ("lora_bias", Some("lora_bias")),
    ("pissa", Some("init_lora_weights is 'pissa'")),
    ("olora", Some("init_lora_weights is 'olora'")),
    ("dora", Some("use_dora")),
    ("tokens", Some("trainable_token_indices")),
];

#[test]
fn adapters_give_peft_s_logits_or_are_refused_with_the_field() {
    let Some(python) = python("adapters_give_peft_s_logits_or_are_refused_with_the_field") else {
        return;
    };
    let folders = scratch("peers-adapters");
    run(&python, "make_adapters.py", &folders);
    for name in ["llama", "llama_grouped", "gpt2"] {
        let pretrained = Pretrained::open(folder(name)).expect("a folder");
        for (kind, refused) in KINDS {
            let from = folders.join(name).join(kind);
            if !from.exists() {
                assert_eq!((name, kind), ("gpt2", "olora"), "all others were written");
                continue;
            }
            let opened = AdapterFolder::open(&from, pretrained.config());
            let Some(field) = refused else {
                let adapter = opened.unwrap_or_else(|error| panic!("{name}, {kind}: {error}"));
                let expected = reference_in(&from);
                let found = adapted_logits(&pretrained, &adapter, &expected["tokens"]);
                let error = (found - &expected["adapted"]).abs().max().double_value(&[]);
                assert!(error < 1e-5, "{name}, {kind}: {error:e}");
                assert_saved_anew(&pretrained, &adapter, &from);
                continue;
            };
            let error = opened.expect_err(kind).to_string();
            assert!(error.contains(field), "{name}, {kind}: {error}");
        }
    }
}

/// Asserts that an adapter of PEFT's stays the same when saved here, and that merging gives the same model.
fn assert_saved_anew(pretrained: &Pretrained, adapter: &AdapterFolder, from: &Path) {
    let (store, model) = built(pretrained, &pretrained.config().layers().lora(adapter.lora()));
    adapter.load(&named(&store)).expect("loaded");
    let again = from.join("again");
    pretrained.save_adapter(&again, adapter.lora(), &named(&store)).expect("saved");
    pretrained.save_merged(from.join("merged"), adapter.lora(), &named(&store)).expect("saved");
    let again = AdapterFolder::open(again, pretrained.config()).expect("an adapter");
    let tokens = &reference_in(from)["tokens"];
    let expected = answer(&model, tokens);
    for found in [adapted_logits(pretrained, &again, tokens), logits(&from.join("merged"), tokens)]
    {
        assert!(found.allclose(&expected, 0.0, 1e-5, false), "{}", from.display());
    }
}
