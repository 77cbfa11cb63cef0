//! A file of text as sequences of tokens.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use tch::Tensor;

use super::{Dataset, Examples, Sample};
use crate::tokenizer::Tokenizer;

/// The whole text, cut into sequences.
pub(super) fn load(path: &Path, length: i64, tokenizer: &Tokenizer) -> Result<Dataset> {
    of_tokens(&tokenizer.encode(&read(path)?)?, path, length, tokenizer)
}

pub(super) fn read(path: &Path) -> Result<String> {
    let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let text = String::from_utf8(bytes).map_err(|error| error.utf8_error());
    text.with_context(|| format!("{} is not UTF-8 text", path.display()))
}

/// Cuts a file's tokens into sequences one after the other; the last tenth is for testing.
pub(super) fn of_tokens(
    tokens: &[i64],
    path: &Path,
    length: i64,
    tokenizer: &Tokenizer,
) -> Result<Dataset> {
    let (train, test) =
        split(tokens, length).with_context(|| format!("{} does not do", path.display()))?;
    Ok(Dataset {
        train,
        test,
        sample: Sample::Sequence { length, vocabulary: tokenizer.vocabulary() },
        description: format!("{}, sequences of {length} tokens", path.display()),
    })
}

fn split(tokens: &[i64], length: i64) -> Result<(Examples, Examples)> {
    ensure!(length > 0, "sequences of {length} tokens hold nothing: give at least 1");
    let test = tokens.len() / 10;
    // The shorter part needs a sequence, and one token more as its last target.
    ensure!(
        test as i64 > length,
        "it has {} tokens, but at least {} are needed, so that the tenth of it that is for testing holds \
         a sequence of {length} and one more: take a longer text, or --sequence {} at most",
        tokens.len(),
        10 * (length + 1),
        test.saturating_sub(1)
    );
    let (train, test) = tokens.split_at(tokens.len() - test);
    Ok((cut(train, length), cut(test, length)))
}

/// Sequences that follow on each other; a rest that is too short is left out.
fn cut(tokens: &[i64], length: i64) -> Examples {
    let count = (tokens.len() as i64 - 1) / length;
    let tokens = Tensor::from_slice(tokens);
    let from = |start| tokens.narrow(0, start, count * length).reshape([count, length]);
    Examples { inputs: from(0), targets: from(1) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn file(name: &str, bytes: &[u8]) -> PathBuf {
        let path = std::env::temp_dir().join(format!("brimful-text-{name}-{}", std::process::id()));
        fs::write(&path, bytes).expect("written");
        path
    }

    fn load_once(name: &str, bytes: &[u8], length: i64) -> Result<Dataset> {
        let path = file(name, bytes);
        let loaded = load(&path, length, &Tokenizer::bytes());
        fs::remove_file(path).expect("removed");
        loaded
    }

    fn numbers(tensor: &Tensor) -> Vec<i64> {
        tensor.flatten(0, -1).try_into().expect("numbers")
    }

    #[test]
    fn sequences_follow_on_each_other_and_targets_are_one_later() {
        let text: Vec<u8> = (0..50).map(|i| b'0' + i).collect();
        let data = load_once("bytes", &text, 4).expect("data");
        assert_eq!(data.sample, Sample::Sequence { length: 4, vocabulary: 256 });
        // 45 tokens to train on: 11 sequences and the last target; 5 to test on.
        assert_eq!((data.train.len(), data.test.len()), (11, 1));
        assert_eq!(numbers(&data.train.inputs), (48..92).collect::<Vec<_>>());
        assert_eq!(numbers(&data.train.targets), (49..93).collect::<Vec<_>>());
        assert_eq!(numbers(&data.test.inputs), (93..97).collect::<Vec<_>>());
    }

    #[test]
    fn texts_that_are_too_short_and_lengths_that_make_no_sense_are_refused() {
        for (text, length, expected) in [
            ("", 1, "it has 0 tokens, but at least 20 are needed"),
            (&"x".repeat(49), 4, "it has 49 tokens, but at least 50 are needed, so that the tenth"),
            ("abc", 0, "give at least 1"),
        ] {
            let error = load_once("short", text.as_bytes(), length);
            let error = format!("{:#}", error.expect_err(text));
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn a_file_that_is_not_text_is_refused_with_the_place() {
        let error = load_once("binary", b"ok\xff\xfe", 1).expect_err("binary");
        let error = format!("{error:#}");
        assert!(error.contains("not UTF-8 text") && error.contains("index 2"), "{error}");
    }
}
