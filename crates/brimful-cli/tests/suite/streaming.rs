//! Data that stay on the disk: memory does not grow with them, and a run that is interrupted within an epoch resumes
//! to the same weights.

use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::thread::sleep;
use std::time::Duration;

use crate::program::{folder, process, saved, train_in};

/// Config of a model so small that a test with megabytes of data takes seconds.
const CONFIG: &str = r#"{"model_type": "llama", "hidden_act": "silu", "hidden_size": 8, "intermediate_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": true, "vocab_size": 256}"#;

/// Trains seven steps at once and in two runs, the first of which ends within an epoch, and asserts that both save
/// exactly the same.
fn check_resumed(folder: &Path, line: &str) {
    let line = format!("{line} --batch-size 8 --micro-batch-size 4");
    for steps in [
        "--max-steps 7 --save whole.safetensors",
        "--max-steps 3 --save part.safetensors",
        "--max-steps 7 --resume part.safetensors --save rest.safetensors",
    ] {
        train_in(folder, &format!("{line} {steps}")).success();
    }
    let [(whole, told), (rest, told_again)] =
        ["whole.safetensors", "rest.safetensors"].map(|name| saved(folder.join(name)));
    // An epoch has five steps.
    assert_eq!((&*told["epoch"], &*told["step"]), ("1", "2"));
    assert_eq!(told, told_again);
    for ((name, whole), (_, rest)) in whole.iter().zip(&rest) {
        assert_eq!(whole, rest, "{name}");
    }
}

fn lines(count: usize, line: impl Fn(usize) -> String) -> String {
    (0..count).fold(String::new(), |mut text, number| {
        writeln!(text, "{}", line(number)).expect("in memory");
        text
    })
}

#[test]
fn a_run_on_text_documents_or_conversations_goes_on_within_an_epoch() {
    // 40 sequences of 8 tokens to train on.
    let text = lines(52, |number| format!("{number:06}"));
    let documents = lines(52, |number| format!("{{\"text\": \"{number:06}\"}}"));
    let conversations = lines(44, |number| {
        format!(
            "{{\"messages\": [{{\"role\": \"user\", \"content\": \"{number}?\"}}, {{\"role\": \"assistant\", \
             \"content\": \"{}\"}}]}}",
            "!".repeat(number % 9)
        )
    });
    for (name, data, length) in
        [("book.txt", text, 8), ("book.jsonl", documents, 8), ("chat.jsonl", conversations, 64)]
    {
        let folder = folder(&format!("streamed-{name}"));
        fs::write(folder.join(name), data).expect("written");
        check_resumed(&folder, &format!("--model gpt --data {name} --sequence {length}"));
    }
}

#[test]
fn a_run_on_images_goes_on_within_an_epoch() {
    let folder = folder("streamed-images");
    for (class, warm) in [("warm", true), ("cold", false)] {
        let class = folder.join("images").join(class);
        fs::create_dir_all(&class).expect("a folder");
        // 20 of 22 images per class are for training.
        for number in 0..22 {
            let picture = crate::program::picture(20 + number, 24, warm, number);
            picture.save(class.join(format!("{number}.jpg"))).expect("written");
        }
    }
    check_resumed(&folder, "--model mlp --data images --image 12");
}

/// Returns the peak memory of the program after it has trained some steps, in kB.
fn peak_of_training(folder: &Path, data: &str) -> u64 {
    let log = folder.join("steps.csv");
    let _ = fs::remove_file(&log);
    let mut training = process();
    training.current_dir(folder).env("OMP_NUM_THREADS", "1");
    let line = "train --device cpu --model tiny --from-scratch --sequence 500 --batch-size 64 --micro-batch-size 64 \
                --log steps.csv --data";
    training.args(line.split_whitespace()).arg(data);
    let training = training.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let mut training = training.expect("it starts");
    let status = format!("/proc/{}/status", training.id());
    // A heading and five steps.
    while fs::read_to_string(&log).unwrap_or_default().lines().count() < 6 {
        assert!(training.try_wait().expect("it runs").is_none(), "it has ended");
        sleep(Duration::from_millis(20));
    }
    let told = fs::read_to_string(status).expect("it runs");
    training.kill().and_then(|()| training.wait()).expect("it is gone");
    let most = told.lines().find_map(|line| line.strip_prefix("VmHWM:")?.split_whitespace().next());
    most.and_then(|most| most.parse().ok()).expect("a number")
}

/// Memory left in threads' heaps varies by up to 45 MB between runs; the data take 112 MB.
#[test]
fn memory_does_not_grow_with_the_data() {
    let folder = folder("streamed-memory");
    fs::create_dir(folder.join("tiny")).expect("a folder");
    fs::write(folder.join("tiny/config.json"), CONFIG).expect("written");
    let text = format!("{}\n", "What is written, is written. ".repeat(34));
    let document = format!("{{\"text\": {:?}}}\n", text.trim_end());
    for (kind, line, many) in [("txt", text, 120_000), ("jsonl", document, 120_000)] {
        let peaks = [8_000, many].map(|count| {
            let data = folder.join(format!("{count}.{kind}"));
            fs::write(&data, line.repeat(count)).expect("written");
            let peak = peak_of_training(&folder, &data.display().to_string());
            fs::remove_file(data).expect("removed");
            peak
        });
        let [few, more] = peaks;
        assert!(
            more < few + 60_000,
            "{kind}: {few} kB with 8 MB of data, {more} kB with {many} kB"
        );
    }
}
