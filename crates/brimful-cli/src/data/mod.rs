//! Data sets that the program trains on: shipped, read from files, or synthetic.

mod chat_template;
mod conversations;
mod digits;
mod idx;
mod images;
mod json_lines;
#[cfg(test)]
mod peer_tokens;
mod portions;
mod record;
mod samples;
mod synthetic;
mod text;

use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::str::FromStr;

use anyhow::{Context, Result, bail, ensure};
use brimful::{Bytes, memory};
use serde_json::{Map, Value};
use tch::Tensor;

use crate::exit::does_not_fit;
use crate::tokenizer::Tokenizer;
use record::is_record;

pub(crate) use digits::load as digits;
pub use images::ImageLoader;
pub(crate) use images::{NewImages, are_images, open_new};
pub(crate) use samples::Shuffle;
pub(crate) use samples::{Rows, SampleRequest, SampleSet};
pub(crate) use synthetic::{Synthetic, generate as synthetic};
pub(crate) use text::usual_length;

/// Target that libtorch's losses ignore.
pub(crate) const IGNORED: i64 = -100;

/// Token at the positions after the end of a sequence. Any token does, because no position within a sequence
/// attends to later positions.
const PADDING: i64 = 0;

/// Byte order mark, which some editors write before the first line of UTF-8.
const BYTE_ORDER_MARK: char = '\u{feff}';
/// File extensions of JSON: first with one object per line, then in any form.
const JSON_LINES: [&str; 2] = ["jsonl", "ndjson"];
const JSON: &str = "json";
/// Limit on the bytes that are read to detect the form of a file.
const BEGINNING: u64 = 1 << 24;

/// Samples and their targets, stacked along the first dimension.
#[derive(Debug)]
pub(crate) struct Examples {
    pub(crate) inputs: Tensor,
    pub(crate) targets: Tensor,
    /// Indices of requested samples that could not be loaded.
    pub(crate) lacking: Vec<usize>,
    /// Lengths of the samples, if samples of the set can differ in length.
    pub(crate) lengths: Option<RowLengths>,
}

/// Lengths of sequences, in tokens.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RowLengths {
    each: Vec<i64>,
    /// Length of the longest sample in the whole set, requested or not.
    longest: i64,
    /// Limit on the length of a sample.
    most: i64,
}

impl Examples {
    /// Makes examples that all have one length. No requested sample is missing.
    fn whole(inputs: Tensor, targets: Tensor) -> Self {
        Self { inputs, targets, lacking: Vec::new(), lengths: None }
    }

    /// Returns inputs and targets in the form that an engine takes.
    pub(crate) fn into_batch(self) -> Result<(Rows, Rows)> {
        let Self { inputs, targets, lengths, .. } = self;
        let Some(RowLengths { each, most, .. }) = lengths else {
            return Ok((Rows::Alike(inputs), Rows::Alike(targets)));
        };
        let rows = |rows, padding| Rows::unlike(rows, &each, most, padding);
        Ok((rows(&inputs, PADDING)?, rows(&targets, IGNORED)?))
    }

    /// Returns inputs and targets padded to the longest sample of the set.
    pub(crate) fn into_largest(self) -> (Tensor, Tensor) {
        let Self { inputs, targets, lengths, .. } = self;
        let Some(RowLengths { longest, .. }) = lengths else { return (inputs, targets) };
        let padded = |rows: &Tensor, padding| {
            let (count, width) = (rows.size()[0], rows.size()[1]);
            let rest =
                Tensor::full([count, longest - width], padding, (rows.kind(), rows.device()));
            Tensor::cat(&[rows, &rest], 1)
        };
        (padded(&inputs, PADDING), padded(&targets, IGNORED))
    }

    /// Returns the number of samples.
    pub(crate) fn len(&self) -> usize {
        usize::try_from(self.inputs.size()[0]).unwrap_or(0)
    }
}

/// Shape of a sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sample {
    /// An image as floats, channels × height × width; the target is its class.
    Image { shape: [i64; 3], classes: i64 },
    /// An image as floats; the target has a 0 or 1 for each pixel, also as floats.
    Mask { shape: [i64; 3] },
    /// A sequence of token numbers. The target at each position is the next token, or -100 if the position does
    /// not count in the loss.
    Sequence { length: i64, vocabulary: i64 },
}

impl Sample {
    /// Refuses `count` samples at once if the machine lacks the memory for them.
    pub(crate) fn check_room(&self, count: usize) -> Result<()> {
        let bytes = |count: usize| {
            let all = self.bytes().saturating_mul(count as u128);
            Bytes(u64::try_from(all).unwrap_or(u64::MAX))
        };
        let (each, all, free) = (bytes(1), bytes(count), memory::host_available()?);
        ensure!(
            all <= free,
            does_not_fit(format!(
                "{count} samples of {each} each take {all}, but this machine has {free} free: lower \
                 --batch-size, --sequence or --image"
            ))
        );
        Ok(())
    }

    /// Returns the bytes of a sample with its target.
    fn bytes(&self) -> u128 {
        const NUMBER: u128 = size_of::<f32>() as u128;
        const TOKEN: u128 = size_of::<i64>() as u128;
        let product = |sizes: &[i64]| {
            let sizes = sizes.iter().map(|size| u128::from(size.unsigned_abs()));
            sizes.fold(1, u128::saturating_mul)
        };
        match self {
            Self::Image { shape, .. } => NUMBER.saturating_mul(product(shape)),
            Self::Mask { shape: [channels, height, width] } => {
                NUMBER.saturating_mul(product(&[channels + 1, *height, *width]))
            }
            Self::Sequence { length, .. } => TOKEN.saturating_mul(product(&[2, *length])),
        }
    }
}

/// Samples to train on, samples to test on, and their shape.
#[derive(Debug)]
pub(crate) struct Dataset {
    pub(crate) train: SampleSet,
    pub(crate) test: SampleSet,
    pub(crate) sample: Sample,
    /// Description in one line.
    pub(crate) description: String,
    /// Names of the classes, if they have any.
    pub(crate) class_names: Vec<String>,
    /// Scale that the pixels were normalised with, which is saved with the model; none for other kinds of data.
    pub(crate) pixels: Option<PixelScale>,
}

impl Dataset {
    /// Makes a data set without class names.
    fn of([train, test]: [SampleSet; 2], sample: Sample, description: String) -> Self {
        Self { train, test, sample, description, class_names: Vec::new(), pixels: None }
    }
}

/// Properties of samples that the user or a trained model may set.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SampleWishes {
    /// Length of a sequence, in tokens.
    pub(crate) sequence: Option<usize>,
    /// Height and width of the images of a folder.
    pub(crate) image: Option<usize>,
    /// Scale of pixels to use instead of the training images' scale.
    pub(crate) pixels: Option<PixelScale>,
}

/// Default side of an image in pixels.
const SIDE: i64 = 224;

/// Opens the data at this path: a folder of images or of MNIST-format files, or a text file, which is cut into
/// sequences of the given length.
pub(crate) fn open(path: &Path, length: i64, wishes: SampleWishes) -> Result<Dataset> {
    let shown = path.display();
    ensure!(path.try_exists()?, "{shown} does not exist");
    match path.is_dir() {
        true if images::has_classes(path)? => {
            images::load(path, wishes.image.map_or(SIDE, |pixels| pixels as i64))
        }
        true => idx::load(path, wishes.pixels),
        false => open_text(path, length, &Tokenizer::bytes()),
    }
}

/// Opens a file of text, or of JSON with texts, in sequences of `length` tokens.
pub(crate) fn open_text(path: &Path, length: i64, tokenizer: &Tokenizer) -> Result<Dataset> {
    match JsonForm::of(path)? {
        Some(form) => json_lines::load(path, form, length, tokenizer),
        None => text::load(path, length, tokenizer),
    }
}

/// Form of JSON objects in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum JsonForm {
    Lines,
    Array,
}

impl JsonForm {
    /// Detects the form of a file by its name and content. Returns none for plain text.
    fn of(path: &Path) -> Result<Option<Self>> {
        let ending = path.extension().unwrap_or_default().to_string_lossy().to_lowercase();
        let has_lines = JSON_LINES.contains(&&*ending);
        let is_json = has_lines || ending == JSON;
        // A pipe can be read only once, so only its name decides.
        if !path.is_file() {
            return Ok(has_lines.then_some(Self::Lines));
        }
        let line = first_line(path).with_context(|| format!("cannot read {}", path.display()))?;
        let object = serde_json::from_str::<Map<String, Value>>(&line).ok();
        let is_array = line.strip_prefix('[').is_some_and(|rest| {
            let rest = rest.trim_start();
            rest.starts_with('{') || (is_json && rest.is_empty())
        });
        ensure!(
            has_lines || !is_json || is_array || object.is_some() || !line.starts_with('{'),
            "{} is one JSON object over several lines: give an array of objects, or an object a line; to train \
             on its text as it is, name it .txt",
            path.display()
        );
        Ok(match object {
            Some(object) if is_json || is_record(&object) => Some(Self::Lines),
            _ if is_array => Some(Self::Array),
            _ => is_json.then_some(Self::Lines),
        })
    }
}

/// Reads the first line that is not empty, trimmed.
fn first_line(path: &Path) -> io::Result<String> {
    let mut file = BufReader::new(File::open(path)?.take(BEGINNING));
    let is_blank = |letter: char| letter == BYTE_ORDER_MARK || letter.is_whitespace();
    loop {
        let mut line = Vec::new();
        let read = file.read_until(b'\n', &mut line)?;
        let text = String::from_utf8_lossy(&line);
        let text = text.trim_matches(is_blank);
        if read == 0 || !text.is_empty() {
            return Ok(text.to_owned());
        }
    }
}

/// Joins training and test images (samples × channels × height × width). Normalises the pixels with `told`, or
/// else with the mean and deviation of the training images.
fn of_images(
    train: Examples,
    test: Examples,
    classes: i64,
    name: &str,
    told: Option<PixelScale>,
) -> Result<Dataset> {
    let [_, channels, height, width] = train.inputs.size()[..] else {
        bail!("{name} does not hold images");
    };
    let scale = told.map_or_else(|| PixelScale::of(&train.inputs, name), Ok)?;
    let normalise = |half: Examples| Examples { inputs: scale.apply(&half.inputs), ..half };
    let dataset = Dataset::of(
        [train, test].map(|half| SampleSet::Held(normalise(half))),
        Sample::Image { shape: [channels, height, width], classes },
        format!("{name}, {height}×{width} pixels, {classes} classes"),
    );
    Ok(Dataset { pixels: Some(scale), ..dataset })
}

/// Mean and deviation of the pixels that a model was trained on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct PixelScale {
    mean: f64,
    deviation: f64,
}

impl PixelScale {
    /// Computes the scale of these images. `name` is their name in an error.
    pub(super) fn of(images: &Tensor, name: &str) -> Result<Self> {
        let deviation = images.std(true).double_value(&[]);
        ensure!(deviation.is_normal(), "every training image in {name} has the same pixels");
        Ok(Self { mean: images.mean(None).double_value(&[]), deviation })
    }

    /// Normalises pixels, so that the pixels of the training images have mean 0 and deviation 1.
    pub(super) fn apply(self, images: &Tensor) -> Tensor {
        (images - self.mean) / self.deviation
    }
}

/// Writes the exact numbers, for a saved run.
impl fmt::Display for PixelScale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mean, deviation } = self;
        write!(f, "{mean:?} {deviation:?}")
    }
}

impl FromStr for PixelScale {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (mean, deviation) = text.split_once(' ').ok_or(())?;
        let number = |text: &str| text.parse().map_err(|_| ());
        Ok(Self { mean: number(mean)?, deviation: number(deviation)? })
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::write::GzEncoder;

    use super::*;

    pub(super) fn gz(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(vec![], Default::default());
        encoder.write_all(bytes).expect("in memory");
        encoder.finish().expect("in memory")
    }

    #[test]
    fn a_path_without_data_is_an_error_that_names_it() {
        let error = open(Path::new("/no/such/data"), 8, SampleWishes::default())
            .expect_err("nothing there");
        assert!(format!("{error:#}").starts_with("/no/such/data does not exist"), "{error:#}");
    }

    #[test]
    fn samples_that_no_machine_holds_are_refused_with_their_bytes() {
        let sequence = |length| Sample::Sequence { length, vocabulary: 256 };
        let image = Sample::Image { shape: [3, i64::MAX, i64::MAX], classes: 2 };
        assert!(sequence(64).check_room(8).is_ok());
        for (sample, count) in [(sequence(1 << 40), 640), (sequence(64), 1 << 62), (image, 1)] {
            let error = sample.check_room(count).expect_err("too many").to_string();
            let begin = format!("{count} samples of ");
            assert!(error.starts_with(&begin) && error.contains(" TiB, but this"), "{error}");
        }
    }

    #[test]
    fn images_without_contrast_are_refused() {
        let grey = || {
            let inputs = Tensor::ones([2, 1, 2, 2], (tch::Kind::Float, tch::Device::Cpu));
            Examples::whole(inputs, Tensor::from_slice(&[0_i64, 1]))
        };
        let error =
            of_images(grey(), grey(), 2, "fog", None).expect_err("nothing to see").to_string();
        assert!(error.starts_with("every training image in fog has the same pixels"), "{error}");
    }
}
