//! The data sets that the program trains on: shipped, read from files, or made up.

mod chat_template;
mod conversations;
mod digits;
mod idx;
mod images;
mod json_lines;
mod number_file;
mod number_stream;
mod portions;
mod sample_set;
mod shuffle;
mod side_by_side;
mod streamed;
mod synthetic;
mod text;

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use brimful::{Bytes, memory};
use tch::Tensor;

use crate::exit::does_not_fit;
use crate::tokenizer::Tokenizer;
pub(crate) use digits::load as digits;
pub use images::ImageLoader;
pub(crate) use sample_set::{SampleRequest, SampleSet};
pub(crate) use shuffle::Shuffle;
pub(crate) use synthetic::{Synthetic, generate as synthetic};
pub(crate) use text::usual_length;

/// The target of a place that does not count, as the losses of libtorch know it.
pub(crate) const IGNORED: i64 = -100;

/// Samples and what they should give, side by side along the first dimension.
#[derive(Debug)]
pub(crate) struct Examples {
    pub(crate) inputs: Tensor,
    pub(crate) targets: Tensor,
    /// The numbers of those that were asked for and could not be made.
    pub(crate) lacking: Vec<usize>,
}

impl Examples {
    /// All that were asked for.
    fn whole(inputs: Tensor, targets: Tensor) -> Self {
        Self { inputs, targets, lacking: Vec::new() }
    }

    /// How many samples there are.
    pub(crate) fn len(&self) -> usize {
        usize::try_from(self.inputs.size()[0]).unwrap_or(0)
    }
}

/// What a sample is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sample {
    /// An image as floats, channels × height × width; the target is its class.
    Image { shape: [i64; 3], classes: i64 },
    /// An image as floats; the target marks each pixel with 0 or 1, as floats too.
    Mask { shape: [i64; 3] },
    /// A sequence of token numbers; the targets are the same sequence, one token later, or
    /// -100 where they do not count.
    Sequence { length: i64, vocabulary: i64 },
}

impl Sample {
    /// Refuses so many of them at once where the machine has no memory for them.
    pub(crate) fn check_room(&self, count: usize) -> Result<()> {
        let bytes = |count: usize| {
            let all = self.bytes().saturating_mul(count as u128);
            Bytes(u64::try_from(all).unwrap_or(u64::MAX))
        };
        let (each, all, free) = (bytes(1), bytes(count), memory::host()?.available);
        ensure!(
            all <= free,
            does_not_fit(format!(
                "{count} samples of {each} each take {all}, but this machine has {free} free: lower \
                 --batch-size, --sequence or --image"
            ))
        );
        Ok(())
    }

    /// What one takes with its target.
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

/// Examples to train on, others to test on, and what they are.
#[derive(Debug)]
pub(crate) struct Dataset {
    pub(crate) train: SampleSet,
    pub(crate) test: SampleSet,
    pub(crate) sample: Sample,
    /// One line for people.
    pub(crate) description: String,
    /// What the classes are called, where they have names.
    pub(crate) class_names: Vec<String>,
}

impl Dataset {
    /// Those to train on, and those to test on, whose classes have no names.
    fn of([train, test]: [SampleSet; 2], sample: Sample, description: String) -> Self {
        Self { train, test, sample, description, class_names: Vec::new() }
    }
}

/// How large samples are wanted, where that is for the user to say.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SampleSizes {
    /// Tokens of a sequence.
    pub(crate) sequence: Option<usize>,
    /// Height and width of an image of a folder of these.
    pub(crate) image: Option<usize>,
}

/// Pixels of an image's side where nobody says otherwise.
const SIDE: i64 = 224;

/// The data at this path: a folder of images or of MNIST-format files, or a file of text, which is cut into
/// sequences of the given length.
pub(crate) fn open(path: &Path, length: i64, side: Option<usize>) -> Result<Dataset> {
    let what = path
        .metadata()
        .with_context(|| format!("no data at {}: give a folder or a file", path.display()))?;
    match what.is_dir() {
        true if images::has_classes(path)? => {
            images::load(path, side.map_or(SIDE, |pixels| pixels as i64))
        }
        true => idx::load(path),
        false => open_text(path, length, &Tokenizer::bytes()),
    }
}

/// A file of text, or of JSON that holds texts, in sequences of so many tokens.
pub(crate) fn open_text(path: &Path, length: i64, tokenizer: &Tokenizer) -> Result<Dataset> {
    match path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("jsonl")) {
        true => json_lines::load(path, length, tokenizer),
        false => text::load(path, length, tokenizer),
    }
}

/// Puts two halves of images (samples × channels × height × width) together, pixels moved to mean 0
/// and deviation 1 by the training half's own figures.
fn of_images(train: Examples, test: Examples, classes: i64, name: &str) -> Result<Dataset> {
    let [_, channels, height, width] = train.inputs.size()[..] else {
        bail!("{name} does not hold images");
    };
    let (mean, deviation) = (train.inputs.mean(None), train.inputs.std(true));
    if !deviation.double_value(&[]).is_normal() {
        bail!("every training image in {name} has the same pixels: there is nothing to learn");
    }
    let normalise = |half: Examples| {
        let inputs = (half.inputs - &mean) / &deviation;
        Examples { inputs, ..half }
    };
    Ok(Dataset::of(
        [train, test].map(|half| SampleSet::Held(normalise(half))),
        Sample::Image { shape: [channels, height, width], classes },
        format!("{name}, {height}×{width} pixels, {classes} classes"),
    ))
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
        let error = open(Path::new("/no/such/data"), 8, None).expect_err("nothing there");
        assert!(format!("{error:#}").starts_with("no data at /no/such/data"), "{error:#}");
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
        let error = of_images(grey(), grey(), 2, "fog").expect_err("nothing to see").to_string();
        assert!(error.starts_with("every training image in fog has the same pixels"), "{error}");
    }
}
