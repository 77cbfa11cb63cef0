//! Folders with a mutated config.json or adapter_config.json: accepted, or refused in one clear line, within 2 GB.
//!
//! | variable | what it sets |
//! | --- | --- |
//! | `BRIMFUL_FUZZ_CASES` | number of mutations (50) |
//! | `BRIMFUL_FUZZ_SEED` | seed of the first one (0) |

#[path = "suite/program/mod.rs"]
mod program;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use program::{complains, folder, run, text};
use serde_json::{Map, Value, json};

/// Memory limit of a process in KiB.
const MOST: &str = "2097152";
/// Values for the mutated fields.
const VALUES: &str = r#"[null, true, false, "", "text", "none", -1, 0, 1, 2, 3, 7, 64, 0.5, 1.5, -0.1, 1e-300, 1e300,
    10000, 1000000, 16777216, 1000000000000, 4611686018427387904, -9223372036854775808, 18446744073709551615,
    [], [1], ["q_proj"], [null], {}, {"factor": 2}, {"rope_type": "linear", "factor": 0},
    {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
     "original_max_position_embeddings": 1e30}, {"q_proj": 2}, {".*": -1}, {"(": 3}, ".*", "(a*)*b", "all-linear"]"#;
/// Fields that the files may have in addition to their own.
const MORE: [&str; 14] = [
    "rope_scaling",
    "rope_parameters",
    "head_dim",
    "sliding_window",
    "layer_types",
    "quantization_config",
    "logit_scale",
    "n_inner",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "modules_to_save",
    "layers_to_transform",
    "exclude_modules",
];

/// Returns the config of the repository's tiny Llama.
fn llama() -> String {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
    fs::read_to_string(examples.join("tiny-llama/config.json")).expect("read")
}

/// Returns the config of a tiny GPT-2.
fn gpt2() -> String {
    json!({ "model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 256,
        "activation_function": "gelu_new", "n_inner": null, "resid_pdrop": 0.1 })
    .to_string()
}

/// Pseudo-random sequence (splitmix64).
struct Draws(u64);

impl Draws {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((mixed ^ (mixed >> 31)) % end as u64) as usize
    }
}

/// Folder of a model, and folder of an adapter for it.
struct Tuned {
    model: PathBuf,
    adapter: PathBuf,
}

#[test]
fn folders_with_changed_configs_are_taken_or_refused_in_one_line_within_2_gb() {
    let folder = folder("mutations");
    let tuned = [("llama", llama()), ("gpt2", gpt2())]
        .map(|(name, config)| tuned(&folder.join(name), &config));
    let values: Vec<Value> = serde_json::from_str(VALUES).expect("values");
    let first = number("BRIMFUL_FUZZ_SEED", 0);
    let seeds = first..first + number("BRIMFUL_FUZZ_CASES", 50);
    let taken = seeds.clone().filter(|seed| is_taken(&tuned, &values, *seed)).count();
    // If all or none were accepted, the mutations would not reach the fields that the program reads.
    assert!((1..seeds.count()).contains(&taken), "{taken} were taken");
}

#[test]
fn an_adapter_of_another_model_is_refused_by_name() {
    let folder = folder("other-adapter");
    let llama = tuned(&folder.join("llama"), &llama());
    let gpt2 = tuned(&folder.join("gpt2"), &gpt2());
    let output = generate(&gpt2.model, &llama.adapter);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("target_modules means no layer of this model"), "{said}");
    // The error says what a folder is that is not a model.
    let line = format!("generate --device cpu --model {}", llama.adapter.display());
    complains(&line, 2, "holds a LoRA adapter, not a model");
}

fn number(variable: &str, usual: u64) -> u64 {
    let given = std::env::var(variable).ok();
    given.map_or(usual, |text| text.parse().expect("a whole number"))
}

/// Makes a model from scratch, and an adapter for it.
fn tuned(folder: &Path, config: &str) -> Tuned {
    let begun = folder.join("begun");
    fs::create_dir_all(&begun).expect("a folder");
    fs::write(begun.join("config.json"), config).expect("written");
    let (text, begun) = (text(folder), begun.display());
    let [model, adapter] = ["model", "adapter"].map(|name| folder.join(name));
    let train = format!("train --device cpu --sequence 16 --max-steps 1 --data {text}");
    run(&format!("{train} --model {begun} --from-scratch --save {}", model.display())).success();
    let lora = format!("--lora 2 --save {}", adapter.display());
    run(&format!("{train} --model {} {lora}", model.display())).success();
    Tuned { model, adapter }
}

/// Mutates a file, lets the program read it, and restores it. Asserts that a refusal is one line.
fn is_taken(tuned: &[Tuned; 2], values: &[Value], seed: u64) -> bool {
    let mut draws = Draws(seed);
    let Tuned { model, adapter } = &tuned[draws.below(2)];
    let file = match draws.below(3) {
        0 => adapter.join("adapter_config.json"),
        _ => model.join("config.json"),
    };
    let before = fs::read_to_string(&file).expect("read");
    let changed = changed(&before, values, &mut draws);
    fs::write(&file, &changed).expect("written");
    let output = generate(model, adapter);
    fs::write(&file, &before).expect("written");
    let said = String::from_utf8_lossy(&output.stderr);
    let code = output.status.code();
    let is_told = match code {
        Some(0) => true,
        // Failure, wrong use, or out of memory.
        Some(1..=3) => said.starts_with("brimful: ") && said.trim_end().lines().count() == 1,
        _ => false,
    };
    assert!(is_told, "seed {seed}: {code:?}: {said}\n{}: {changed}", file.display());
    code == Some(0)
}

/// Returns a file with one to three mutations.
fn changed(text: &str, values: &[Value], draws: &mut Draws) -> String {
    let mut config: Map<String, Value> = serde_json::from_str(text).expect("an object");
    for _ in 0..=draws.below(3) {
        let keys: Vec<String> = config.keys().cloned().chain(MORE.map(str::to_owned)).collect();
        let key = keys[draws.below(keys.len())].clone();
        match draws.below(10) {
            0 => drop(config.remove(&key)),
            1 => drop(config.insert(format!("{key}_x"), values[draws.below(values.len())].clone())),
            _ => drop(config.insert(key, values[draws.below(values.len())].clone())),
        }
    }
    let changed = Value::Object(config).to_string();
    // Some are not valid JSON.
    match draws.below(20) {
        0 => changed[..draws.below(changed.len())].to_owned(),
        1 => "[".repeat(100_000),
        2 => changed.replacen('1', "\u{0}", 1),
        _ => changed,
    }
}

fn generate(model: &Path, adapter: &Path) -> Output {
    let program = env!("CARGO_BIN_EXE_brimful");
    let mut shell = Command::new("sh");
    shell.args([
        "-c",
        r#"ulimit -d "$0"; exec "$@""#,
        MOST,
        program,
        "generate",
        "--device",
        "cpu",
    ]);
    shell.args(["--prompt", "A", "--tokens", "2", "--model"]).arg(model);
    shell.arg("--adapter").arg(adapter).env("OMP_NUM_THREADS", "1");
    shell.env_remove("LD_LIBRARY_PATH").env_remove("RUST_BACKTRACE");
    shell.output().expect("a shell")
}
