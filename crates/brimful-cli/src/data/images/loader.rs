//! The images of a folder as a training is given them, for the benchmark of that alone.

use std::path::Path;

use anyhow::Result;
use brimful::split;
use tch::Tensor;

use super::super::{SampleRequest, SampleSet, Shuffle};

/// Images to train on, in mini-batches.
#[derive(Debug)]
pub struct ImageLoader {
    images: SampleSet,
    batch_size: usize,
}

impl ImageLoader {
    /// All images of a folder, with a subfolder a class, as squares of this side, decoded by so many threads.
    ///
    /// # Errors
    /// When the folder is none of images.
    pub fn open(folder: &Path, side: i64, threads: usize, batch_size: usize) -> Result<Self> {
        let (classes, _) = super::readable(super::classes(folder)?)?;
        let images = super::streamed(classes, side, threads);
        Ok(Self { images, batch_size })
    }

    /// How many images there are.
    pub fn images(&self) -> usize {
        self.images.len()
    }

    /// Brings all of them once, in an order of this seed's, the next mini-batch made ready while `take` has one.
    ///
    /// # Errors
    /// When no image of a mini-batch can be read.
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
