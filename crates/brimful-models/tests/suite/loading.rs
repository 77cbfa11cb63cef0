//! Loading a folder needs little more host memory than its weights, on the device or offloaded.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use brimful::pipeline::Offload;
use brimful::schedule::Schedule;
use brimful::{Pipeline, memory};
use brimful_models::pretrained::Pretrained;
use serde_json::json;
use tch::Device;
use tch::nn::VarStore;

/// Environment of the process that loads a folder: the folder, and whether to offload its weights.
const LOADS: [&str; 2] = ["BRIMFUL_TEST_LOADS", "BRIMFUL_TEST_LIVES"];
const NAME: &str = "a_folder_takes_at_most_a_fifth_more_than_its_weights";
/// Layers and tokens: an embedding of 50 MB, which must not exist twice, before equal layers of 7 MB.
const LARGE: (usize, usize) = (22, 32_768);
const TINY: (usize, usize) = (1, 64);

#[test]
fn a_folder_takes_at_most_a_fifth_more_than_its_weights() {
    if let [Ok(folder), Ok(location)] = LOADS.map(env::var) {
        return load_and_tell(Path::new(&folder), &location);
    }
    let [large, tiny] = [LARGE, TINY].map(described);
    for folder in [&large, &tiny] {
        fill(folder);
    }
    let weights = fs::metadata(large.join("model.safetensors")).expect("a file").len();
    assert!(weights > 190_000_000, "{weights} bytes");
    for location in ["device", "host"] {
        // Libtorch's own memory is part of both peaks.
        let more = peak_of(&large, location).saturating_sub(peak_of(&tiny, location));
        let ratio = more as f64 / weights as f64;
        assert!((0.9..1.2).contains(&ratio), "{location}: {more} bytes for {weights}: {ratio:.2}");
    }
    for folder in [large, tiny] {
        fs::remove_dir_all(folder).expect("removed");
    }
}

/// Makes a folder with only a config.
fn described((layers, tokens): (usize, usize)) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("loading-{layers}"));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).expect("a folder");
    let config = json!({ "model_type": "llama", "hidden_act": "silu", "vocab_size": tokens, "hidden_size": 384,
        "intermediate_size": 1024, "num_hidden_layers": layers, "num_attention_heads": 4,
        "max_position_embeddings": 64, "tie_word_embeddings": true });
    fs::write(folder.join("config.json"), config.to_string()).expect("written");
    folder
}

/// Adds weights to it.
fn fill(folder: &Path) {
    let described = Pretrained::without_weights(folder).expect("a folder");
    let store = VarStore::new(Device::Cpu);
    described.config().layers().build(&store.root()).expect("a model");
    let variables: Vec<_> = store.variables().into_iter().collect();
    described.save(folder, &variables).expect("saved");
}

/// Returns the peak memory of a process that loads the folder.
fn peak_of(folder: &Path, location: &str) -> u64 {
    let output = Command::new(env::current_exe().expect("the test's own program"))
        .args(["--exact", &format!("loading::{NAME}"), "--nocapture", "--test-threads", "1"])
        .envs(LOADS.into_iter().zip([folder.to_str().expect("a path"), location]))
        .env("OMP_NUM_THREADS", "1")
        .output()
        .expect("a process");
    let text = String::from_utf8_lossy(&output.stdout);
    let told = text.lines().find_map(|line| line.strip_prefix("peak: "));
    let told = told.and_then(|bytes| bytes.parse().ok());
    told.unwrap_or_else(|| panic!("{text}{}", String::from_utf8_lossy(&output.stderr)))
}

/// Loads a folder, and prints the peak memory of this process.
fn load_and_tell(folder: &Path, location: &str) {
    // The program does so too.
    memory::keep_freed_blocks();
    let pretrained = Pretrained::open(folder).expect("a folder");
    let layers = pretrained.config().layers();
    if location == "device" {
        let store = VarStore::new(Device::Cpu);
        let _model = layers.build(&store.root()).expect("a model");
        let variables: Vec<_> = store.variables().into_iter().collect();
        pretrained.load(&variables).expect("loaded");
        return tell_peak();
    }
    let stages_per_device = layers.len();
    let pipe = Pipeline::builder(layers)
        .devices([Device::Cpu])
        .balance(vec![1; stages_per_device])
        .schedule(Schedule::BreadthFirst { stages_per_device })
        .offload(Offload::Host)
        .build()
        .expect("a pipeline");
    pretrained.load(&pipe.variables().expect("variables")).expect("loaded");
    tell_peak();
}

#[allow(clippy::print_stdout, reason = "it is read by the process that has started this one")]
fn tell_peak() {
    let status = fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a line");
    let kibibytes: u64 = line.trim().trim_end_matches("kB").trim().parse().expect("a number of kB");
    println!("\npeak: {}", kibibytes * 1024);
}
