//! Normalisation of the pixels of images in memory.

use std::fmt;
use std::str::FromStr;

use anyhow::{Result, ensure};
use tch::Tensor;

/// Mean and deviation of the pixels that a model was trained on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct PixelScale {
    mean: f64,
    deviation: f64,
}

impl PixelScale {
    /// Computes the scale of these images; an error calls them by `name`.
    pub(super) fn of(images: &Tensor, name: &str) -> Result<Self> {
        let deviation = images.std(true).double_value(&[]);
        ensure!(deviation.is_normal(), "every training image in {name} has the same pixels");
        Ok(Self { mean: images.mean(None).double_value(&[]), deviation })
    }

    /// Normalises pixels, so that those of the training images have mean 0 and deviation 1.
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
