//! Image samples, decoded in parallel by several threads, and the crop of each image.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::{Result, ensure};
use tch::{Device, Kind, Tensor};

use super::{decoded, name_broken};
use crate::data::samples::{NumberStream, SampleRequest, SampleSource, mixed};
use crate::data::{Examples, portions};

/// An image file and its class.
#[derive(Debug)]
pub(super) struct ImageFile {
    pub(super) path: PathBuf,
    pub(super) class: i64,
}

/// Images as squares of one size.
#[derive(Debug)]
pub(super) struct ImageSamples {
    files: Vec<ImageFile>,
    side: i64,
    threads: usize,
    /// Indices of files that turned out to be damaged.
    broken: BTreeSet<usize>,
}

impl ImageSamples {
    pub(super) fn new(files: Vec<ImageFile>, side: i64, threads: usize) -> Self {
        Self { files, side, threads, broken: BTreeSet::new() }
    }

    /// Decodes and crops an image. With a seed, as in training, the crop is random, so that each epoch shows
    /// another part of the image.
    fn shown(&self, number: usize, seed: Option<u64>) -> Result<Tensor> {
        let pixels = decoded::pixels(&self.files[number].path)?;
        let (_, _, height, width) = pixels.size4()?;
        let view = match seed {
            None => ImageView::central(height, width),
            Some(seed) => {
                let mut numbers = NumberStream::new(mixed(seed) ^ mixed(number as u64));
                ImageView::random(height, width, &mut numbers)
            }
        };
        decoded::shown(&pixels, view, self.side)
    }

    /// Prints the path of an unreadable image, but only once.
    fn note(&mut self, number: usize, error: &anyhow::Error) {
        if self.broken.insert(number) {
            name_broken(&self.files[number].path, error, self.broken.len());
        }
    }
}

impl SampleSource for ImageSamples {
    fn len(&self) -> usize {
        self.files.len()
    }

    fn bring(&mut self, request: &SampleRequest) -> Result<Examples> {
        let (side, wanted) = (self.side, request.numbers.len());
        let inputs = Tensor::f_empty([wanted as i64, 3, side, side], (Kind::Float, Device::Cpu))?;
        let jobs = (0..wanted as i64).map(|place| inputs.narrow(0, place, 1));
        let jobs = request.numbers.iter().copied().zip(jobs).collect();
        let read = portions::in_parallel(jobs, self.threads, |(number, mut place)| {
            place.f_copy_(&self.shown(number, request.seed)?)?;
            Ok::<_, anyhow::Error>(())
        });
        let (mut whole, mut targets, mut lacking) = (Vec::new(), Vec::new(), Vec::new());
        for (place, (number, read)) in request.numbers.iter().zip(read).enumerate() {
            match read {
                Ok(()) => {
                    whole.push(place as i64);
                    targets.push(self.files[*number].class);
                }
                Err(error) => {
                    lacking.push(*number);
                    self.note(*number, &error);
                }
            }
        }
        ensure!(
            wanted == 0 || !whole.is_empty(),
            "none of the {wanted} images of a mini-batch can be read: remove the broken ones, or take larger \
             mini-batches"
        );
        let inputs = match whole.len() == wanted {
            true => inputs,
            false => inputs.index_select(0, &Tensor::from_slice(&whole)),
        };
        Ok(Examples { lacking, ..Examples::whole(inputs, Tensor::from_slice(&targets)) })
    }
}

/// Share of the shorter side that the crop shows, as in 224 of 256 pixels.
const SHOWN: (i64, i64) = (7, 8);

/// A square of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ImageView {
    pub(super) top: i64,
    pub(super) left: i64,
    pub(super) side: i64,
    pub(super) mirrored: bool,
}

impl ImageView {
    /// Returns the centre of the image, not mirrored.
    pub(super) fn central(height: i64, width: i64) -> Self {
        let side = shown(height, width);
        Self { top: (height - side) / 2, left: (width - side) / 2, side, mirrored: false }
    }

    /// Returns a square at a random place, mirrored half the time.
    pub(super) fn random(height: i64, width: i64, numbers: &mut NumberStream) -> Self {
        let side = shown(height, width);
        let mut place = |room: i64| numbers.below(room.unsigned_abs() + 1) as i64;
        let (top, left) = (place(height - side), place(width - side));
        Self { top, left, side, mirrored: numbers.below(2) == 1 }
    }
}

fn shown(height: i64, width: i64) -> i64 {
    (height.min(width) * SHOWN.0 / SHOWN.1).max(1)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use image::{Rgb, RgbImage};

    use super::*;

    /// Makes five files, each of a different class. The fourth file is not an image.
    fn samples(folder: &std::path::Path) -> ImageSamples {
        let file = |number: u32| {
            let path = folder.join(format!("{number}.png"));
            let shade = |x, y| Rgb([(x * 9 + number) as u8, (y * 5) as u8, (x * y % 251) as u8]);
            RgbImage::from_fn(24, 32, shade).save(&path).expect("written");
            ImageFile { path, class: number.into() }
        };
        let files: Vec<_> = (0..5).map(file).collect();
        fs::write(&files[3].path, "no image").expect("written");
        ImageSamples::new(files, 8, 2)
    }

    fn request(numbers: &[usize], seed: Option<u64>) -> SampleRequest {
        SampleRequest { numbers: numbers.to_vec(), seed }
    }

    #[test]
    fn the_seed_and_the_image_decide_what_is_shown() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut samples = samples(folder.path());
        let mut inputs = |numbers: &[usize], seed| {
            samples.bring(&request(numbers, seed)).expect("images").inputs
        };
        let [one, other] = [&[0, 1, 2][..], &[2, 0]].map(|numbers| inputs(numbers, Some(7)));
        assert_eq!(one.size(), [3, 3, 8, 8]);
        // An image does not depend on the others in the request, nor on their order.
        assert_eq!(other.get(0), one.get(2));
        assert_eq!(other.get(1), one.get(0));
        assert_ne!(inputs(&[0, 1, 2], Some(8)), one);
        assert_eq!(inputs(&[0, 1], None), inputs(&[0, 1], None));
        assert_eq!(inputs(&[], None).size(), [0, 3, 8, 8]);
    }

    #[test]
    fn what_cannot_be_read_is_left_out_with_its_class() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut samples = samples(folder.path());
        let Examples { inputs, targets, lacking, .. } =
            samples.bring(&request(&[4, 3, 1], None)).expect("two");
        assert_eq!(lacking, [3]);
        assert_eq!(Vec::<i64>::try_from(targets).expect("classes"), [4, 1]);
        assert_eq!(inputs, samples.bring(&request(&[4, 1], None)).expect("two").inputs);
        let error = samples.bring(&request(&[3], None)).expect_err("none is left").to_string();
        assert!(error.starts_with("none of the 1 images of a mini-batch can be read"), "{error}");
    }

    #[test]
    fn the_middle_is_seven_eighths_of_the_shorter_side() {
        let view = ImageView::central(256, 320);
        assert_eq!(view, ImageView { top: 16, left: 48, side: 224, mirrored: false });
        assert_eq!(ImageView::central(1, 5).side, 1);
    }

    #[test]
    fn random_squares_are_everywhere_within_the_image() {
        let mut numbers = NumberStream::new(1);
        let views: Vec<_> = (0..500).map(|_| ImageView::random(16, 32, &mut numbers)).collect();
        let all = |place: fn(&ImageView) -> i64| {
            let mut places: Vec<_> = views.iter().map(place).collect();
            places.sort_unstable();
            places.dedup();
            places
        };
        assert_eq!(all(|view| view.top), [0, 1, 2]);
        assert!(all(|view| view.left).into_iter().eq(0..=18));
        let mirrored = views.iter().filter(|view| view.mirrored).count();
        assert!((200..300).contains(&mirrored), "{mirrored}");
    }
}
