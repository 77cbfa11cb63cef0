//! Help texts of flags that several commands share, and parsers of the flags' values. A flag has one name and one
//! text in all commands.
//!
//! A command can add details after a colon, or a default in brackets.

use std::num::IntErrorKind;
use std::ops::RangeInclusive;
use std::thread;

use brimful::MicroBatches;
use brimful::schedule::{Recompute, Schedule};

pub const DEVICE: &str = "Device: cpu, cuda or cuda:1";

/// Help of `--device` where the flag has a default.
pub const ANY_DEVICE: &str = "Device: cpu, cuda or cuda:1 [default: cuda if there is a GPU]";

pub const DATA: &str = "Data: digits, synthetic, text file or image folder";

/// Long help of `--data`.
pub(crate) const DATA_FORMS: &str = "\
    Data: digits (shipped), synthetic, a folder of images (one subfolder per class) or of MNIST-format IDX files, or a \
    text file (.jsonl, .json: documents or conversations)";

pub const IMAGE: &str = "Image size in pixels [default: 224]";

pub const BATCH_NORM: &str = "BatchNorm statistics in training [default: deferred]";

pub const DTYPE: &str = "Precision of parameters and activations";

pub const BATCH_SIZE: &str = "Samples per mini-batch";

pub const MICRO_BATCH: &str = "Samples per micro-batch";

/// Help of `--micro-batch-size` where the flag allows automatic sizes.
pub(crate) const ANY_MICRO_BATCH: &str = "Samples per micro-batch: a number, auto or largest";

pub const MICRO_BATCHES: &str = "Micro-batches per mini-batch";

pub const LORA: &str = "Train LoRA adapters of this rank; the base weights stay frozen";

pub const FROM_SCRATCH: &str =
    "Initialize a folder's model at random; only its config.json is read";

pub const MEMORY_LIMIT: &str = "Memory limit of each device, such as 96MiB or 16GB";

pub const STAGES: &str = "Number of devices in the pipeline, each with a stage";

/// Long help of `--stages`.
pub(crate) const STAGES_LONG: &str = "\
    Number of devices in the pipeline (not of stages, if a device has several). A device has one stage by default, V \
    with a schedule whose name ends in -V (two with interleaved-2), and two with zero-bubble-v and auto-v";

pub const SCHEDULE: &str = "Pipeline schedule: gpipe, 1f1b, interleaved-V, auto, …";

/// Long help of `--schedule` where the schedule is executed.
pub const SCHEDULES: &str = "\
    Pipeline schedule: gpipe, 1f1b, interleaved-V, breadth-first-V, zero-bubble-h1, interleaved-zero-bubble-V, \
    zero-bubble-v, or one made from measured times: auto, auto-interleaved-V, auto-v. V stands for the number of stages \
    per device, as in interleaved-2";

pub const RECOMPUTE: &str = "Activation recomputation: never, except-last, always";

/// Long help of `--recompute`.
pub(crate) const RECOMPUTE_LONG: &str = "\
    Activation recomputation: never, except-last, always. A stage that recomputes keeps only its input, and reruns its \
    forward before its backward. With `except-last`, a micro-batch whose backward directly follows its forward, such as \
    the last one, is not recomputed. Offloaded stages always recompute, whatever this flag says";

pub const EPOCHS: &str = "Number of epochs";

pub const LEARNING_RATE_DECAY: &str = "Learning rate decay: none, linear or cosine";

pub const SEED: &str = "Random seed";

pub const JSON: &str = "Print JSON instead of text: one object";

/// Help of `--json` where a command prints rows or epochs as they are done.
pub const JSON_LINES: &str =
    "Print JSON instead of text: one object per line, the last with \"done\": true";

/// Limit of every number, because libtorch counts with signed integers.
const MOST: u64 = i64::MAX as u64;
/// Limit on threads per core. With ever more threads, steps slow down until they never end.
const THREADS_OF_CORE: usize = 16;

/// Parses a whole number of at least 1.
pub fn count(text: &str) -> Result<usize, String> {
    counted(text, "give a whole number from 1 on")
}

/// Parses a whole number of at least 1. The error for any other text is `wanted`.
pub(crate) fn counted(text: &str, wanted: &str) -> Result<usize, String> {
    whole_number(text, 1..=MOST, wanted).map(|count| count as usize)
}

/// Parses the number of samples in a micro-batch, `auto` or `largest`.
pub(crate) fn micro_batch(text: &str) -> Result<MicroBatches, String> {
    match text {
        "auto" => Ok(MicroBatches::Auto),
        "largest" => Ok(MicroBatches::Largest),
        _ => counted(text, "give a number from 1 on, auto or largest").map(MicroBatches::Samples),
    }
}

/// Parses a whole number of at least 0.
pub fn count_or_none(text: &str) -> Result<usize, String> {
    whole_number(text, 0..=MOST, "give a whole number from 0 on").map(|count| count as usize)
}

/// Parses a random seed.
pub fn seed(text: &str) -> Result<u64, String> {
    whole_number(text, 0..=u64::MAX, "give a whole number from 0 on")
}

/// Parses a time to wait, in whole seconds.
pub fn seconds(text: &str) -> Result<u64, String> {
    whole_number(text, 1..=MOST, "give whole seconds from 1 on")
}

/// Parses a schedule. The error suggests the most similar name.
pub fn schedule(text: &str) -> Result<Schedule, String> {
    let names = Schedule::all(2).map(|schedule| schedule.to_string());
    text.parse()
        .map_err(|error| format!("{error}{}", did_you_mean(text, names.iter().map(String::as_str))))
}

/// Parses a mode of activation recomputation.
pub fn recompute(text: &str) -> Result<Recompute, String> {
    let names = Recompute::ALL.map(Recompute::name);
    text.parse().map_err(|error| format!("{error}{}", did_you_mean(text, names)))
}

/// Parses a number of threads, limited by the machine's cores.
pub fn threads(text: &str) -> Result<usize, String> {
    let (threads, cores) = (count(text)?, thread::available_parallelism().map_or(1, usize::from));
    let most = THREADS_OF_CORE * cores;
    match threads <= most {
        true => Ok(threads),
        false => Err(format!("this machine's number of cores is {cores}: give at most {most}")),
    }
}

/// Parses a number of at least 0, such as a time, a factor or an error.
pub fn not_negative(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0);
    number.ok_or_else(|| "give a number from 0 on".into())
}

/// Parses an integer in this range. For a number that is too small and a text that is no number, the error is
/// `wanted`.
fn whole_number(text: &str, range: RangeInclusive<u64>, wanted: &str) -> Result<u64, String> {
    let is_too_large = match text.parse::<u64>() {
        Ok(number) if range.contains(&number) => return Ok(number),
        Ok(number) => number > *range.end(),
        Err(error) => *error.kind() == IntErrorKind::PosOverflow,
    };
    Err(match is_too_large {
        true => format!("it is too large: give at most {}", range.end()),
        false => wanted.to_owned(),
    })
}

/// Returns `; did you mean 'gpt2'?`, or nothing if no name is similar.
pub(crate) fn did_you_mean<'a>(text: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    nearest(text, known).map_or_else(String::new, |name| format!("; did you mean '{name}'?"))
}

/// Returns the known name that differs from `text` by the fewest typos, if these are few.
pub(crate) fn nearest<'a>(text: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // Writing `_` for `-` does not count as a typo.
    let text = text.replace('_', "-");
    let slips = |name: &str| (strsim::damerau_levenshtein(&text, name), name.len());
    let nearest = known.into_iter().min_by_key(|name| slips(name))?;
    (slips(nearest).0 <= 1 + text.len() / 4).then_some(nearest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_too_large_is_told_from_one_too_small() {
        let large = "it is too large: give at most 9223372036854775807";
        for number in ["9223372036854775808", "99999999999999999999"] {
            assert_eq!(count(number), Err(large.into()));
            assert_eq!(count_or_none(number), Err(large.into()));
        }
        assert_eq!(seed("18446744073709551615"), Ok(u64::MAX));
        for small in ["0", "-1", "1.5", "many", ""] {
            assert_eq!(count(small), Err("give a whole number from 1 on".into()), "{small}");
        }
        assert_eq!((count("7"), count_or_none("0"), seed("0")), (Ok(7), Ok(0), Ok(0)));
    }

    #[test]
    fn threads_that_no_machine_could_run_are_refused_with_its_cores() {
        assert_eq!(threads("1"), Ok(1));
        let error = threads("3000000").expect_err("too many");
        assert!(error.starts_with("this machine's number of cores is "), "{error}");
    }

    #[test]
    fn a_number_that_is_negative_infinite_or_none_is_refused() {
        assert_eq!(not_negative("0.5"), Ok(0.5));
        for text in ["-1", "nan", "inf", "much"] {
            assert_eq!(not_negative(text), Err("give a number from 0 on".into()), "{text}");
        }
    }

    #[test]
    fn a_slip_is_recognised_and_a_stranger_is_not() {
        let known = ["gpipe", "1f1b", "interleaved"];
        assert_eq!(did_you_mean("gpip", known), "; did you mean 'gpipe'?");
        assert_eq!(did_you_mean("1b1f", known), "; did you mean '1f1b'?");
        assert_eq!(nearest("micro_batchs", ["micro-batches", "micro-batch"]), Some("micro-batch"));
        assert_eq!(did_you_mean("pony", known), "");
    }
}
