//! The data sets that the program trains on: shipped, read from files, or made up.

mod chat_template;
mod conversations;
mod digits;
mod idx;
mod images;
mod json_lines;
mod number_file;
mod number_stream;
#[cfg(test)]
mod peer_tokens;
mod pixel_scale;
mod portions;
mod record;
mod rows;
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
pub(crate) use images::{NewImages, are_images, open_new};
use json_lines::JsonForm;
pub(crate) use pixel_scale::PixelScale;
pub(crate) use rows::Rows;
pub(crate) use sample_set::{SampleRequest, SampleSet};
pub(crate) use shuffle::Shuffle;
pub(crate) use synthetic::{Synthetic, generate as synthetic};
pub(crate) use text::usual_length;

/// The target of a place that does not count, as the losses of libtorch know it.
pub(crate) const IGNORED: i64 = -100;

/// What stands after a sequence's end: any token does, since nothing that counts sees what follows it.
const PADDING: i64 = 0;

/// Samples and what they should give, side by side along the first dimension.
#[derive(Debug)]
pub(crate) struct Examples {
    pub(crate) inputs: Tensor,
    pub(crate) targets: Tensor,
    /// The numbers of those that were asked for and could not be made.
    pub(crate) lacking: Vec<usize>,
    /// Where they are of unlike length, how long they are.
    pub(crate) lengths: Option<RowLengths>,
}

/// Lengths of sequences, in tokens.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RowLengths {
    each: Vec<i64>,
    /// Of all samples, those included that were not asked for.
    longest: i64,
    /// No sample may be longer.
    most: i64,
}

impl Examples {
    /// All that were asked for.
    fn whole(inputs: Tensor, targets: Tensor) -> Self {
        Self { inputs, targets, lacking: Vec::new(), lengths: None }
    }

    /// Inputs and targets as an engine takes them.
    pub(crate) fn into_batch(self) -> Result<(Rows, Rows)> {
        let Self { inputs, targets, lengths, .. } = self;
        let Some(RowLengths { each, most, .. }) = lengths else {
            return Ok((Rows::Alike(inputs), Rows::Alike(targets)));
        };
        let rows = |rows, padding| Rows::unlike(rows, &each, most, padding);
        Ok((rows(&inputs, PADDING)?, rows(&targets, IGNORED)?))
    }

    /// Inputs and targets as large as any so many samples are.
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
    /// What normalised its images, where that is of its own making.
    pub(crate) pixels: Option<PixelScale>,
}

impl Dataset {
    /// Those to train on, and those to test on, whose classes have no names.
    fn of([train, test]: [SampleSet; 2], sample: Sample, description: String) -> Self {
        Self { train, test, sample, description, class_names: Vec::new(), pixels: None }
    }
}

/// How samples are wanted, where that is for the user or a trained model to say.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SampleWishes {
    /// Tokens of a sequence.
    pub(crate) sequence: Option<usize>,
    /// Height and width of an image of a folder of these.
    pub(crate) image: Option<usize>,
    /// What normalises images, rather than their own training half.
    pub(crate) pixels: Option<PixelScale>,
}

/// Pixels of an image's side where nobody says otherwise.
const SIDE: i64 = 224;

/// The data at this path: a folder of images or of MNIST-format files, or a file of text, which is cut into
/// sequences of the given length.
pub(crate) fn open(path: &Path, length: i64, wishes: SampleWishes) -> Result<Dataset> {
    let what = path
        .metadata()
        .with_context(|| format!("no data at {}: give a folder or a file", path.display()))?;
    match what.is_dir() {
        true if images::has_classes(path)? => {
            images::load(path, wishes.image.map_or(SIDE, |pixels| pixels as i64))
        }
        true => idx::load(path, wishes.pixels),
        false => open_text(path, length, &Tokenizer::bytes()),
    }
}

/// A file of text, or of JSON that holds texts, in sequences of so many tokens.
pub(crate) fn open_text(path: &Path, length: i64, tokenizer: &Tokenizer) -> Result<Dataset> {
    match JsonForm::of(path)? {
        Some(form) => json_lines::load(path, form, length, tokenizer),
        None => text::load(path, length, tokenizer),
    }
}

/// Puts two halves of images (samples × channels × height × width) together, pixels normalised by the training
/// half's own figures, or by those that are told.
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
        let error =
            of_images(grey(), grey(), 2, "fog", None).expect_err("nothing to see").to_string();
        assert!(error.starts_with("every training image in fog has the same pixels"), "{error}");
    }
}
