//! Text files as sequences of tokens. The tokens stay on the disk, as integers with as many bytes as the largest
//! token needs.

use std::env;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use tch::Tensor;
use thiserror::Error;

use super::portions::{self, Portion, TextCut};
use super::samples::{SampleRequest, SampleSource};
use super::{Dataset, Examples, Sample, SampleSet};
use crate::output::numbered;
use crate::tokenizer::Tokenizer;

/// Loads a whole text, cut into sequences.
pub(super) fn load(path: &Path, length: i64, tokenizer: &Tokenizer) -> Result<Dataset> {
    // If bytes are the tokens, the text's own file holds the tokens. But a pipe can be read only once, so its
    // tokens are written to another file.
    let tokens = match tokenizer.is_bytes() && path.is_file() {
        true => {
            portions::each(path, TextCut::Words, |_| Ok(()), Ok)?;
            NumberFile::of_bytes(File::open(path)?)?
        }
        false => {
            let mut tokens = NumberWriter::new(tokenizer.vocabulary())?;
            let [begin, end] = tokenizer.around();
            tokens.append(begin)?;
            let encode = |portion: &Portion| tokenizer.encode_part(portion.before, &portion.text);
            portions::each(path, TextCut::Words, encode, |encoded| tokens.append(&encoded))?;
            tokens.append(end)?;
            tokens.finish()?
        }
    };
    of_tokens(tokens, path, length, tokenizer)
}

/// Cuts a file's tokens into consecutive sequences; the last tenth is for testing.
pub(super) fn of_tokens(
    tokens: NumberFile,
    path: &Path,
    length: i64,
    tokenizer: &Tokenizer,
) -> Result<Dataset> {
    let halves =
        split(tokens, length).with_context(|| format!("{} is too short", path.display()))?;
    Ok(Dataset::of(
        halves.map(SampleSet::streamed),
        Sample::Sequence { length, vocabulary: tokenizer.vocabulary() },
        format!("{}, sequences of {length} tokens", path.display()),
    ))
}

fn split(tokens: NumberFile, length: i64) -> Result<[TokenWindows; 2]> {
    ensure!(length > 0, "sequences of {length} tokens hold nothing: give at least 1");
    let (all, test) = (tokens.len(), tokens.len() / 10);
    let length = length as u64;
    // The shorter part, for tests, needs one sequence, and one more token: the target of the sequence's last
    // token.
    ensure!(test > length, ShortText { tokens: all, length });
    let windows = |first, end| TokenWindows {
        tokens: tokens.clone(),
        first,
        count: (end - first - 1) / length,
        length,
    };
    Ok([windows(0, all - test), windows(all - test, all)])
}

/// Error for a text too short for one sequence in each of its parts.
#[derive(Debug, Error)]
#[error(
    "it has {}, but at least {} are needed: a tenth is held out for testing, and a sequence of length {length} takes {} \
     tokens (the last is only a target); take a longer text{}",
    numbered(*tokens as usize, "token"), self.taken().saturating_mul(10), self.taken(), self.shorter()
)]
struct ShortText {
    tokens: u64,
    length: u64,
}

/// Number of test sequences to aim for when the length of a sequence is chosen to suit the text.
const USUAL_TESTS: u64 = 4;

impl ShortText {
    /// Returns the number of tokens of one sequence with its targets.
    fn taken(&self) -> u64 {
        self.length.saturating_add(1)
    }

    fn shorter(&self) -> String {
        match self.tokens / 10 {
            0 | 1 => String::new(),
            test => format!(", or --sequence {} at most", test - 1),
        }
    }
}

/// Returns a length of sequences that suits a text that was refused as too short. Returns none for any other
/// error.
pub(crate) fn usual_length(error: &anyhow::Error) -> Option<i64> {
    let ShortText { tokens, .. } = error.downcast_ref()?;
    let length = (tokens / 10).saturating_sub(1) / USUAL_TESTS;
    i64::try_from(length).ok().filter(|length| *length > 0)
}

/// Consecutive sequences. A rest that is too short for a sequence is left out.
#[derive(Debug)]
struct TokenWindows {
    tokens: NumberFile,
    /// Position of the first token.
    first: u64,
    count: u64,
    length: u64,
}

impl SampleSource for TokenWindows {
    fn len(&self) -> usize {
        self.count as usize
    }

    fn bring(&mut self, request: &SampleRequest) -> Result<Examples> {
        let Self { tokens, first, length, .. } = self;
        let wide = *length as usize + 1;
        let mut windows = Vec::with_capacity(request.numbers.len() * wide);
        for number in &request.numbers {
            let start = *first + *number as u64 * *length;
            windows.extend(tokens.read(start..start + *length + 1)?);
        }
        let windows = Tensor::from_slice(&windows).view([-1, wide as i64]);
        let from = |start| windows.narrow(1, start, *length as i64).contiguous();
        Ok(Examples::whole(from(0), from(1)))
    }
}

/// Integers on the disk.
#[derive(Debug, Clone)]
pub(super) struct NumberFile {
    file: Arc<File>,
    /// Bytes per number, little-endian.
    width: usize,
    len: u64,
}

impl NumberFile {
    /// Opens a file in which each byte is a number.
    pub(super) fn of_bytes(file: File) -> Result<Self> {
        let len = file.metadata()?.len();
        Ok(Self { file: Arc::new(file), width: 1, len })
    }

    /// Returns the number of integers in the file.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Reads the numbers in this range.
    pub(super) fn read(&self, places: Range<u64>) -> Result<Vec<i64>> {
        let Self { file, width, .. } = self;
        let mut bytes = vec![0; (places.end - places.start) as usize * width];
        file.read_exact_at(&mut bytes, places.start * *width as u64)
            .context("the data cannot be read any more: do not change them while they are used")?;
        Ok(bytes.chunks_exact(*width).map(number).collect())
    }
}

fn number(bytes: &[u8]) -> i64 {
    let mut whole = [0; 8];
    whole[..bytes.len()].copy_from_slice(bytes);
    i64::from_le_bytes(whole)
}

/// Writer of numbers to a file without a name. The file disappears once it is closed.
#[derive(Debug)]
pub(super) struct NumberWriter {
    file: BufWriter<File>,
    folder: PathBuf,
    width: usize,
    len: u64,
}

impl NumberWriter {
    /// Makes a writer for integers from 0 to below the limit.
    pub(super) fn new(limit: i64) -> Result<Self> {
        let holds = |width: &usize| limit <= 1 << (8 * width);
        let width = [1, 2, 4].into_iter().find(holds).unwrap_or(8);
        let folder = scratch_folder();
        let file = fs::create_dir_all(&folder).and_then(|()| tempfile::tempfile_in(&folder));
        let file = file.with_context(|| unwritten(&folder))?;
        Ok(Self { file: BufWriter::new(file), folder, width, len: 0 })
    }

    /// Returns the number of integers written so far.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    pub(super) fn append(&mut self, numbers: &[i64]) -> Result<()> {
        self.len += numbers.len() as u64;
        let bytes =
            numbers.iter().flat_map(|number| number.to_le_bytes().into_iter().take(self.width));
        let bytes: Vec<u8> = bytes.collect();
        self.file.write_all(&bytes).with_context(|| unwritten(&self.folder))
    }

    /// Returns the numbers for reading.
    pub(super) fn finish(self) -> Result<NumberFile> {
        let Self { file, folder, width, len } = self;
        let file = file.into_inner().map_err(|error| error.into_error());
        Ok(NumberFile { file: Arc::new(file.with_context(|| unwritten(&folder))?), width, len })
    }
}

fn unwritten(folder: &Path) -> String {
    format!(
        "the tokens cannot be written to {}: free some space, or set XDG_CACHE_HOME to a folder on a larger disk",
        folder.display()
    )
}

/// Returns a folder in the user's cache, because temporary folders are often in memory.
fn scratch_folder() -> PathBuf {
    let named = |name| env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
    let cache = named("XDG_CACHE_HOME").or_else(|| Some(named("HOME")?.join(".cache")));
    cache.map_or_else(env::temp_dir, |cache| cache.join("brimful"))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn load_once(bytes: &[u8], length: i64) -> Result<Dataset> {
        let file = tempfile::NamedTempFile::new().expect("a file");
        fs::write(file.path(), bytes).expect("written");
        load(file.path(), length, &Tokenizer::bytes())
    }

    fn numbers(tensor: &Tensor) -> Vec<i64> {
        tensor.flatten(0, -1).try_into().expect("numbers")
    }

    #[test]
    fn sequences_follow_on_each_other_and_targets_are_one_later() {
        let text: Vec<u8> = (0..50).map(|i| b'0' + i).collect();
        let mut data = load_once(&text, 4).expect("data");
        assert_eq!(data.sample, Sample::Sequence { length: 4, vocabulary: 256 });
        // 45 tokens to train on: 11 sequences and the last target; 5 to test on.
        assert_eq!((data.train.len(), data.test.len()), (11, 1));
        let [train, test] = [&mut data.train, &mut data.test].map(|half| half.all().expect("all"));
        assert_eq!(numbers(&train.inputs), (48..92).collect::<Vec<_>>());
        assert_eq!(numbers(&train.targets), (49..93).collect::<Vec<_>>());
        assert_eq!(numbers(&test.inputs), (93..97).collect::<Vec<_>>());
        let some = data.train.bring(&SampleRequest::plain([10, 0])).expect("two");
        assert_eq!(numbers(&some.inputs), [88, 89, 90, 91, 48, 49, 50, 51]);
        assert_eq!(
            data.train.bring(&SampleRequest::plain([])).expect("none").inputs.size(),
            [0, 4]
        );
    }

    #[test]
    fn texts_that_are_too_short_and_lengths_that_make_no_sense_are_refused() {
        for (text, length, expected) in [
            ("", 1, "it has 0 tokens, but at least 20 are needed"),
            (
                "",
                1,
                "a sequence of length 1 takes 2 tokens (the last is only a target); take a longer text$",
            ),
            (&"x".repeat(29), 4, "take a longer text, or --sequence 1 at most$"),
            ("abc", i64::MAX, "it has 3 tokens, but at least 18446744073709551615 are needed"),
            (&"x".repeat(49), 4, "it has 49 tokens, but at least 50 are needed: a tenth"),
            ("abc", 0, "give at least 1"),
        ] {
            let error = load_once(text.as_bytes(), length);
            let error = format!("{:#}", error.expect_err(text));
            assert!(format!("{error}$").contains(expected), "{error}");
        }
    }

    #[test]
    fn a_file_that_is_not_text_is_refused_with_the_place() {
        let error = load_once(b"ok\xff\xfe", 1).expect_err("binary");
        let error = format!("{error:#}");
        assert!(error.contains("not UTF-8 text: byte 2"), "{error}");
    }

    /// The text is longer than a portion, with words and lines of any length.
    #[test]
    fn tokens_do_not_depend_on_the_portions_that_a_text_is_read_in() {
        let words = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
            "normalizer": null, "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null,
            "decoder": null, "model": {"type": "WordLevel", "unk_token": "?", "vocab": {"?": 0, "to": 1,
            "be": 2, "or": 3, "not": 400}}}"#;
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("tokenizer.json"), words).expect("written");
        let tokenizer = Tokenizer::open(folder.path()).expect("a tokenizer");
        let line = |number: usize| {
            ["to be ", "or\n", "not\n\n  to ", "be\n", "si\u{ea}\n"][number * number % 7 % 5]
        };
        let text: String = (0..100_000).map(line).collect();
        let path = folder.path().join("text");
        fs::write(&path, &text).expect("written");
        let mut data = load(&path, 10, &tokenizer).expect("data");
        assert_eq!(data.sample, Sample::Sequence { length: 10, vocabulary: 401 });
        let tokens = tokenizer.encode(&text).expect("tokens");
        let read = numbers(&data.train.all().expect("samples").inputs);
        assert!(read.len() > 100_000 && tokens.starts_with(&read));
    }

    #[test]
    fn numbers_come_back_from_any_place() {
        for limit in [0x100, 0x101, 0x1_0000, 0x1_0001, 0x1_0000_0000, i64::MAX] {
            let mut writer = NumberWriter::new(limit).expect("a file");
            writer.append(&[0, 1]).expect("written");
            writer.append(&[limit - 1, 7]).expect("written");
            let file = writer.finish().expect("a file");
            assert_eq!(file.len(), 4);
            assert_eq!(file.read(1..4).expect("numbers"), [1, limit - 1, 7], "{limit}");
            let error = format!("{:#}", file.read(3..5).expect_err("four alone"));
            assert!(error.starts_with("the data cannot be read any more"), "{error}");
        }
    }
}
