//! Folders of MNIST-format files (IDX), such as MNIST and Fashion-MNIST, plain or gzipped.
//!
//! An IDX file consists of two zero bytes, a byte for its dtype, a byte for its number of dimensions, each
//! dimension in four bytes (big-endian), and the numbers.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use anyhow::{Result, bail, ensure};
use flate2::read::GzDecoder;
use tch::{Kind, Tensor};

use super::{Dataset, Examples, PixelScale, of_images};

/// Dtype of images and labels, as a code of the format.
const UNSIGNED_BYTES: u8 = 8;
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// Reads four files: `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, and the two of the test split, which
/// begin with `t10k-`. Each may end in `.gz`.
pub(super) fn load(folder: &Path, told: Option<PixelScale>) -> Result<Dataset> {
    let name = folder.display();
    let [train, test] = [examples(folder, "train")?, examples(folder, "t10k")?];
    let [size, test_size] = [&train, &test].map(|half| half.inputs.size()[2..].to_vec());
    ensure!(
        size == test_size,
        "the images in {name} have {size:?} pixels for training and {test_size:?} for testing: is \
         it one data set?"
    );
    let classes = classes(&train.targets, &test.targets)?;
    of_images(train, test, classes, &name.to_string(), told)
}

/// Returns the number of classes, one more than the largest label. Fails if over half of the classes have no
/// training image: then a label is probably wrong.
fn classes(train: &Tensor, test: &Tensor) -> Result<i64> {
    let classes = train.max().int64_value(&[]).max(test.max().int64_value(&[])) + 1;
    let counts = train.bincount(None::<Tensor>, classes);
    let with_images = counts.gt(0).sum(Kind::Int64).int64_value(&[]);
    let last = classes - 1;
    ensure!(
        2 * with_images >= classes,
        "the labels are numbers up to {last}, which makes {classes} classes, but {with_images} of them alone have \
         an image to learn from ({} are labelled {last}): correct the label, or number the classes from 0 on",
        counts.int64_value(&[last])
    );
    Ok(classes)
}

/// Reads the images and labels of one split, as samples × 1 × height × width and class numbers.
fn examples(folder: &Path, half: &str) -> Result<Examples> {
    let images = read_idx(&find(folder, &format!("{half}-images-idx3-ubyte"))?, 3)?;
    let labels_path = find(folder, &format!("{half}-labels-idx1-ubyte"))?;
    let labels = read_idx(&labels_path, 1)?;
    let (samples, named) = (images.size()[0], labels.size()[0]);
    ensure!(samples > 0, "there are no images for {half} in {}", folder.display());
    ensure!(
        samples == named,
        "{} has {named} labels for {samples} images: download both files again",
        labels_path.display()
    );
    let inputs = images.unsqueeze(1).to_kind(Kind::Float);
    Ok(Examples::whole(inputs, labels.to_kind(Kind::Int64)))
}

/// Finds the file of this name, or of this name with `.gz`.
fn find(folder: &Path, name: &str) -> Result<PathBuf> {
    let candidates = [folder.join(name), folder.join(format!("{name}.gz"))];
    match candidates.into_iter().find(|path| path.is_file()) {
        Some(path) => Ok(path),
        None => bail!(
            "{} has neither {name} nor {name}.gz, nor a subfolder: a folder of MNIST-format data has both \
             images and labels, train-… and t10k-…, under their original names; one of images has a subfolder \
             for each class",
            folder.display()
        ),
    }
}

fn read_idx(path: &Path, dimensions: usize) -> Result<Tensor> {
    let read = File::open(path).map_err(Into::into).and_then(|file| {
        let mut file = BufReader::new(file);
        // Recognises gzip by content, because files get renamed.
        match file.fill_buf()?.starts_with(&GZIP) {
            true => parse(&mut GzDecoder::new(file), dimensions),
            false => parse(&mut file, dimensions),
        }
    });
    read.map_err(|error: anyhow::Error| {
        let path = path.display();
        let what = if error.is::<io::Error>() {
            format!("cannot read {path}")
        } else {
            format!("{path} is not right")
        };
        error.context(what)
    })
}

/// Parses an IDX file. Reads no more than the header announces, because a small gzip file can unpack to any
/// length.
fn parse(file: &mut impl Read, dimensions: usize) -> Result<Tensor> {
    let start = read_up_to(file, 4)?;
    let &[0, 0, kind, count] = &*start else {
        bail!("it is not an IDX file: it does not begin with two zero bytes");
    };
    ensure!(
        kind == UNSIGNED_BYTES,
        "its values are of type {kind:#04x}, not unsigned bytes (0x08)"
    );
    ensure!(usize::from(count) == dimensions, "it has {count} dimensions, not {dimensions}");
    let header = read_up_to(file, 4 * dimensions as u64)?;
    let length = start.len() + header.len();
    ensure!(header.len() == 4 * dimensions, "it ends after {length} bytes, within its header");
    let (sizes, _) = header.as_chunks::<4>();
    let shape: Vec<i64> = sizes.iter().map(|size| u32::from_be_bytes(*size).into()).collect();
    let expected =
        shape.iter().fold(1, |product: u64, size| product.saturating_mul(size.unsigned_abs()));
    let numbers = read_up_to(file, expected.saturating_add(1))?;
    let follow = match numbers.len() as u64 > expected {
        true => "more".to_owned(),
        false => numbers.len().to_string(),
    };
    ensure!(
        expected == numbers.len() as u64,
        "its header says {shape:?}, {expected} bytes, but {follow} follow: download it again"
    );
    Ok(Tensor::from_slice(&numbers).view(&*shape))
}

/// Reads `bytes` bytes, or all if there are fewer.
fn read_up_to(file: &mut impl Read, bytes: u64) -> io::Result<Vec<u8>> {
    let mut read = Vec::new();
    file.take(bytes).read_to_end(&mut read)?;
    Ok(read)
}

#[cfg(test)]
mod tests {
    use super::super::Sample;
    use super::super::tests::gz;
    use super::*;
    use std::fs;
    use tempfile::TempDir;

    /// Makes a folder with three images of 2×2 to train on and two to test on.
    fn filled() -> TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        for (half, samples) in [("train", 3), ("t10k", 2)] {
            let pixels: Vec<u8> = (0..samples * 4).collect();
            let labels: Vec<u8> = (0..samples).collect();
            let images = idx(&[samples.into(), 2, 2], &pixels);
            write(&folder, &format!("{half}-images-idx3-ubyte"), &images);
            write(&folder, &format!("{half}-labels-idx1-ubyte"), &idx(&[samples.into()], &labels));
        }
        folder
    }

    fn write(folder: &TempDir, name: &str, bytes: &[u8]) {
        fs::write(folder.path().join(name), bytes).expect("written");
    }

    fn refusal(folder: &TempDir) -> String {
        format!("{:#}", load(folder.path(), None).expect_err("it is wrong"))
    }

    fn idx(shape: &[u32], numbers: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0, 0, UNSIGNED_BYTES, shape.len() as u8];
        bytes.extend(shape.iter().flat_map(|size| size.to_be_bytes()));
        bytes.extend(numbers);
        bytes
    }

    #[test]
    fn reads_both_halves_and_normalises_by_the_first() {
        let mut data = load(filled().path(), None).expect("data");
        let [train, test] = [&mut data.train, &mut data.test].map(|half| half.all().expect("all"));
        assert_eq!(data.sample, Sample::Image { shape: [1, 2, 2], classes: 3 });
        assert_eq!((data.train.len(), data.test.len()), (3, 2));
        assert_eq!(train.inputs.size(), [3, 1, 2, 2]);
        assert!(train.inputs.mean(None).double_value(&[]).abs() < 1e-6);
        assert_eq!(test.inputs, train.inputs.narrow(0, 0, 2));
        assert_eq!(Vec::<i64>::try_from(&train.targets).expect("labels"), [0, 1, 2]);
    }

    #[test]
    fn gzipped_files_are_read_under_either_name() {
        let folder = filled();
        let inputs =
            || load(folder.path(), None).expect("data").train.all().expect("samples").inputs;
        let plain = inputs();
        for (from, to) in [
            ("train-images-idx3-ubyte", "train-images-idx3-ubyte.gz"),
            ("t10k-labels-idx1-ubyte", "t10k-labels-idx1-ubyte"),
        ] {
            let bytes = fs::read(folder.path().join(from)).expect("plain");
            fs::remove_file(folder.path().join(from)).expect("removed");
            write(&folder, to, &gz(&bytes));
        }
        assert_eq!(inputs(), plain);
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = refusal(&tempfile::tempdir().expect("a folder"));
        assert!(error.contains("has neither train-images-idx3-ubyte nor"), "{error}");
    }

    #[test]
    fn foreign_truncated_and_mismatched_files_are_refused_with_the_numbers() {
        let images = idx(&[3, 2, 2], &[7; 12]);
        let mut floats = images.clone();
        floats[2] = 0x0d;
        let gzipped = gz(&idx(&[3, 2, 2], &(0..12).collect::<Vec<_>>()));
        let cases: [(&[u8], &str); 9] = [
            (b"", "not an IDX file"),
            (b"GIF89a", "not an IDX file"),
            (&images[..9], "ends after 9 bytes, within its header"),
            (&images[..20], "says [3, 2, 2], 12 bytes, but 4 follow"),
            (&floats, "of type 0x0d"),
            (&idx(&[12], &[0; 12]), "has 1 dimensions, not 3"),
            (&idx(&[4, 2, 2], &[0; 16]), "has 3 labels for 4 images"),
            (&idx(&[3, 4, 1], &[0; 12]), "have [4, 1] pixels for training and [2, 2]"),
            (&gzipped[..gzipped.len() - 9], "cannot read"),
        ];
        let folder = filled();
        for (bytes, expected) in cases {
            write(&folder, "train-images-idx3-ubyte", bytes);
            let error = refusal(&folder);
            assert!(error.contains(expected), "{error}");
        }
    }

    /// Some kilobytes that would unpack to 32 MiB: the reader unpacks no more than the header announces.
    #[test]
    fn what_follows_beyond_the_header_is_refused_unread() {
        let folder = filled();
        let bomb = idx(&[3, 2, 2], &vec![0; 32 << 20]);
        for bytes in [gz(&bomb), bomb] {
            write(&folder, "train-images-idx3-ubyte", &bytes);
            let error = refusal(&folder);
            assert!(error.contains("says [3, 2, 2], 12 bytes, but more follow"), "{error}");
        }
    }

    #[test]
    fn a_stray_label_that_would_make_many_classes_is_refused() {
        let folder = filled();
        write(&folder, "train-labels-idx1-ubyte", &idx(&[3], &[0, 1, 77]));
        let error = refusal(&folder);
        assert!(
            error.contains("numbers up to 77, which makes 78 classes, but 3 of them"),
            "{error}"
        );
        assert!(error.contains("(1 are labelled 77)"), "{error}");
    }

    #[test]
    fn a_trained_models_own_figures_normalise_other_data() {
        let folder = filled();
        let own = load(folder.path(), None).expect("data");
        let told: PixelScale = own.pixels.expect("figures").to_string().parse().expect("figures");
        let images = idx(&[3, 2, 2], &[200; 12]);
        write(&folder, "train-images-idx3-ubyte", &images);
        let mut other = load(folder.path(), Some(told)).expect("data");
        assert_eq!(other.pixels, own.pixels);
        let test = |mut data: Dataset| data.test.all().expect("samples").inputs;
        assert_eq!(test(own), other.test.all().expect("samples").inputs);
    }

    #[test]
    fn an_absurd_header_does_not_overflow() {
        let error = parse(&mut &*idx(&[u32::MAX; 3], &[]), 3).expect_err("too large").to_string();
        assert!(error.contains("but 0 follow"), "{error}");
    }
}
