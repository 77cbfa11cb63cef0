//! Images as samples, decoded by as many threads as there are cores.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::{Result, ensure};
use tch::{Device, Kind, Tensor};

use super::super::Examples;
use super::super::number_stream::{NumberStream, mixed};
use super::super::sample_set::SampleRequest;
use super::super::side_by_side;
use super::super::streamed::SampleSource;
use super::view::ImageView;
use super::{decoded, name_broken};

/// An image on the disk.
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
    /// Those that turned out not to be whole.
    broken: BTreeSet<usize>,
}

impl ImageSamples {
    pub(super) fn new(files: Vec<ImageFile>, side: i64, threads: usize) -> Self {
        Self { files, side, threads, broken: BTreeSet::new() }
    }

    /// What is shown of an image: in training, its own part of it in each epoch.
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

    /// Names those that could not be read, each once.
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
        let read = side_by_side::each(jobs, self.threads, |(number, mut place)| {
            place.f_copy_(&self.shown(number, request.seed)?)?;
            Ok::<_, anyhow::Error>(())
        });
        let (mut whole, mut targets) = (Vec::new(), Vec::new());
        for (place, (number, read)) in request.numbers.iter().zip(read).enumerate() {
            match read {
                Ok(()) => {
                    whole.push(place as i64);
                    targets.push(self.files[*number].class);
                }
                Err(error) => self.note(*number, &error),
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
        Ok(Examples { inputs, targets: Tensor::from_slice(&targets) })
    }
}
