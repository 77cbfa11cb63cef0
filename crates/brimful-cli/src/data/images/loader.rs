//! Loader of a folder's images as a training uses it, for benchmarks of data loading.

use std::path::Path;

use anyhow::Result;
use brimful_plan::split;
use tch::Tensor;

use super::super::{SampleRequest, SampleSet, Shuffle};

/// Images to train on, in mini-batches.
#[derive(Debug)]
pub struct ImageLoader {
    images: SampleSet,
    batch_size: usize,
}

impl ImageLoader {
    /// Opens all images of a folder with one subfolder per class, as squares with `side` pixels per side.
    /// `threads` threads decode the images.
    ///
    /// # Errors
    /// Fails if `folder` is not a folder with subfolders of images.
    pub fn open(folder: &Path, side: i64, threads: usize, batch_size: usize) -> Result<Self> {
        let (classes, _) = super::readable(super::classes(folder)?)?;
        let images = super::streamed(classes, side, threads);
        Ok(Self { images, batch_size })
    }

    /// Returns the number of images.
    pub fn images(&self) -> usize {
        self.images.len()
    }

    /// Loads every image once, in an order given by the seed, and prepares the next mini-batch while `take` uses
    /// the current one.
    ///
    /// # Errors
    /// Fails if no image of a mini-batch can be read.
    pub fn epoch(&mut self, seed: u64, mut take: impl FnMut(&Tensor, &Tensor)) -> Result<()> {
        let order = Shuffle::new(self.images(), seed);
        let batches = split::by_size(self.images(), self.batch_size)?;
        let requests: Vec<_> = batches
            .into_iter()
            .map(|places| SampleRequest {
                numbers: places.map(|place| order.at(place)).collect(),
                seed: Some(seed),
            })
            .collect();
        for (number, request) in requests.iter().enumerate() {
            let brought = self.images.bring(request)?;
            requests.get(number + 1).into_iter().for_each(|next| self.images.prepare(next.clone()));
            take(&brought.inputs, &brought.targets);
        }
        Ok(())
    }
}
