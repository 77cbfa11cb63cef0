//! `transformers` and PEFT themselves, where `make transformers` has installed them: what they write is read, and what
//! is written they read.

use std::env;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use brimful::nn::Lora;
use brimful::save::{self, Metadata};
use brimful_models::pretrained::Pretrained;

use super::{
    FOLDERS, answer, assert_read_and_trained, built, folder, named, reference, scratch, trained,
};

/// The Python that has them; where there is none, says so, and the test is skipped.
fn python(test: &str) -> Option<PathBuf> {
    let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cache")))?;
    let home = cache.join("brimful/transformers");
    if home.join("installed.txt").is_file() {
        return Some(home.join("bin/python"));
    }
    // Past the test harness, which keeps what is printed to itself.
    let _ = writeln!(std::io::stderr(), "skipped: {test}: no transformers (make transformers)");
    None
}

/// Runs a script that stands beside this file.
fn run(python: &Path, script: &str, argument: &Path) {
    let mut command = Command::new(python);
    command.arg(folder(script)).arg(argument);
    // Nothing is asked of the network, and the compiler's libraries are not Python's.
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

/// Saves a model that was trained, and an adapter to it, with what they answer.
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
        // Without the usual start, in which an adapter changes nothing.
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
