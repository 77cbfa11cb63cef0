//! What `--help` says of the flags that several commands have: one flag, one name, one text.
//!
//! A command that has more to say says it after a colon, or in brackets where it is its default.

/// Of `--device`.
pub const DEVICE: &str = "Where it runs: cpu, cuda or cuda:1";
/// Of `--device` where none need be given.
pub const ANY_DEVICE: &str =
    "Where it runs: cpu, cuda or cuda:1 [default: cuda where there is one]";
/// Of `--device` where several may be needed.
pub const DEVICES: &str = "Where it runs: cpu, cuda:1, or cuda, of which each stage and rank \
                                  of a machine takes one [default: cuda where there is one]";
/// Of `--data`.
pub const DATA: &str = "The samples: digits (shipped), synthetic (made up), a folder of \
                               MNIST-format IDX files, or a text file";
/// Of `--dtype`.
pub const DTYPE: &str = "Numbers of parameters and activations";
/// Of `--batch-size`.
pub const BATCH_SIZE: &str = "Samples in a mini-batch";
/// Of `--micro-batch`.
pub const MICRO_BATCH: &str = "Samples in a micro-batch";
/// Of `--micro-batches`.
pub const MICRO_BATCHES: &str = "Micro-batches in a mini-batch";
/// Of `--memory-limit`.
pub const MEMORY_LIMIT: &str = "Memory of each device, such as 96MiB or 16GB";
/// Of `--stages`.
pub const STAGES: &str =
    "Devices to cut the layers over, a stage on each: interleaved-V puts V stages on each";
/// Of `--schedule`, where the executor is to run it.
pub const SCHEDULE: &str = "The order of the actions: gpipe, 1f1b or interleaved-V";
/// Of `--recompute`.
pub const RECOMPUTE: &str =
    "Which activations are computed again to save memory: never, except-last or always";
/// Of `--epochs`.
pub const EPOCHS: &str = "Passes over the training set";
/// Of `--learning-rate-decay`.
pub const LEARNING_RATE_DECAY: &str = "How the learning rate falls to 0 over all epochs";
/// Of `--seed`.
pub const SEED: &str = "Where all random numbers start";
/// Of `--json`.
pub const JSON: &str = "Print JSON instead of text: one object";
/// Of `--json` where rows or epochs are told as they come.
pub const JSON_LINES: &str =
    "Print JSON instead of text: an object a line as they come, the last with \"done\": true";

/// Reads a number of things, of which there is at least one.
pub fn count(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("give a whole number from 1 on".into()),
        Ok(count) => Ok(count),
    }
}
