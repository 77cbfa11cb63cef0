//! `brimful train` under a real `mpirun`: rank 0 prints, all ranks train one model, and a single process resumes
//! their saved run.

use std::path::PathBuf;
use std::process::{Command, Output};
use std::{env, fs, str};

use serde_json::Value;

/// Runs `brimful train` on the digits, in this many ranks of `mpirun`, or without it.
fn train(ranks: Option<usize>, flags: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_brimful");
    let mut command = match ranks {
        None => Command::new(program),
        Some(ranks) => {
            let mut command = Command::new("mpirun");
            command.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n"]);
            command.arg(ranks.to_string()).arg(program);
            command
        }
    };
    command.args(["train", "--device", "cpu", "--json", "--num-micro-batches", "4"]).args(flags);
    // Parallel runs of mpirun would create and remove files in the same folder.
    let folder = tempfile::tempdir().expect("a folder");
    command.env("OMP_NUM_THREADS", "1").env("OMPI_MCA_orte_tmpdir_base", folder.path());
    command.output().expect("a run")
}

fn losses(output: &Output) -> Vec<f64> {
    let (text, errors) = (str::from_utf8(&output.stdout), str::from_utf8(&output.stderr));
    assert!(output.status.success(), "{errors:?}");
    let lines = text.expect("text").lines();
    let loss = |line| serde_json::from_str::<Value>(line).expect("JSON")["test_loss"].as_f64();
    lines.map(|line| loss(line).expect("a loss")).collect()
}

/// Asserts that all ranks exit with this code, and that each prints all of these words.
fn assert_all_say(output: &Output, ranks: usize, code: i32, all: &[&str]) {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "where all say {all:?}: {said}");
    for words in all {
        assert_eq!(said.matches(words).count(), ranks, "every rank says {words}: {said}");
    }
}

/// Returns the path of a file that does not exist yet.
fn new_file(name: &str) -> String {
    let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_file(&file);
    file.display().to_string()
}

fn assert_alike(a: &[f64], b: &[f64]) {
    assert_eq!(a.len(), b.len(), "rank 0 alone prints");
    assert!(a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-4 * b), "{a:?} not {b:?}");
}

#[test]
fn ranks_train_what_one_process_trains_and_one_goes_on_from_them() {
    let file = &new_file("ranks.safetensors");
    let alone = losses(&train(None, &["--stages", "2", "--epochs", "3"]));
    let flags = ["--stages", "2", "--epochs", "2", "--save", file];
    assert_alike(&losses(&train(Some(2), &flags)), &alone[..2]);
    let on = &new_file("ranks-on.safetensors");
    let flags = ["--epochs", "3", "--resume", file, "--save", on, "--overwrite"];
    assert_alike(&losses(&train(None, &flags)), &alone[2..]);
    assert_alike(&losses(&train(Some(2), &flags)), &alone[2..]);
    // Each pipeline cuts its part into four micro-batches.
    let flags = ["--stages", "2", "--replicas", "2", "--epochs", "2"];
    assert_alike(&losses(&train(Some(4), &flags)), &alone[..2]);
}

#[test]
fn ranks_with_a_whole_model_each_train_what_one_process_trains() {
    let file = &new_file("replicas.safetensors");
    let alone = losses(&train(None, &["--epochs", "3"]));
    assert_alike(&losses(&train(Some(2), &["--replicas", "2", "--epochs", "2"])), &alone[..2]);
    // Two replicas in each rank.
    let flags = ["--replicas", "4", "--epochs", "2", "--save", file];
    assert_alike(&losses(&train(Some(2), &flags)), &alone[..2]);
    let on = &new_file("replicas-on.safetensors");
    let goes_on = ["--epochs", "3", "--resume", file, "--save", on, "--overwrite", "--replicas"];
    let flags = [&goes_on[..], &["1"]].concat();
    assert_alike(&losses(&train(None, &flags)), &alone[2..]);
    let flags = [&goes_on[..], &["3"]].concat();
    assert_alike(&losses(&train(Some(3), &flags)), &alone[2..]);
}

#[test]
fn ranks_that_were_told_different_things_are_refused_before_they_train() {
    let program = env!("CARGO_BIN_EXE_brimful");
    let other = [":", "-n", "1", program, "train", "--device", "cpu", "--replicas", "2"];
    let flags = [&["--replicas", "2", "--batch-size", "64"], &other[..]].concat();
    let words = "rank 1 has --batch-size 128, but rank 0 has --batch-size 64: give all ranks the same \
                 --batch-size";
    assert_all_say(&train(Some(1), &flags), 2, 2, &[words]);
}

#[test]
fn ranks_that_do_not_divide_are_wrong_use_with_the_numbers() {
    for (flags, words) in [
        (&["--stages", "2"][..], "--stages 2: 3 ranks in 1 replicas leave 3 ranks"),
        (
            &["--batch-norm", "exact", "--model", "resnet18"],
            "--batch-norm exact is for one device, but there are 3 ranks",
        ),
        (
            &["--replicas", "2"],
            "3 ranks cannot be divided into 2 replicas of equal size: start a multiple of 2, as in mpirun -n 2",
        ),
    ] {
        assert_all_say(&train(Some(3), flags), 3, 2, &[words]);
    }
}

#[test]
fn a_loss_that_is_no_number_is_reported_by_every_rank_in_the_words_of_the_program() {
    for way in ["--replicas", "--stages"] {
        let flags = [way, "2", "--optimizer", "sgd", "--learning-rate", "1e30", "--epochs", "1"];
        let words = "in epoch 1, step 2: this step was not applied; lower --learning-rate (it is 1e30), or look at \
                     the data\n";
        assert_all_say(&train(Some(2), &flags), 2, 1, &["brimful: the loss is ", words]);
    }
}

#[test]
fn a_place_that_another_run_saves_to_is_refused_by_every_rank() {
    let folder = tempfile::tempdir().expect("a folder");
    let taken = fs::File::create(folder.path().join(".model.safetensors.lock")).expect("a file");
    taken.lock().expect("locked");
    let file = folder.path().join("model.safetensors");
    let flags = ["--replicas", "2", "--epochs", "1", "--save", file.to_str().expect("text")];
    let words = "model.safetensors: another program writes it now: name another file\n";
    assert_all_say(&train(Some(2), &flags), 2, 1, &[words]);
}
