//! Model of a training: a built-in one, or a folder's.

use std::sync::Arc;

use anyhow::Result;
use brimful::Layers;

use super::TrainOptions;
use super::options::Keep;
use crate::data::{Dataset, Sample, SampleWishes};
use crate::exit::{ensure_use, wrong_use};
use crate::fine_tune::FineTune;
use crate::setting::{DROPOUT, ModelName, ModelSource, NormStatistics};

/// A model to be trained.
#[derive(Debug)]
pub(super) enum TrainedModel {
    Named(ModelName),
    Folder(Arc<FineTune>),
}

impl TrainedModel {
    /// Opens the model of the options, and refuses options that do not apply to it.
    pub(super) fn open(options: &TrainOptions) -> Result<Self> {
        match &options.model {
            ModelSource::Named(name) => {
                options.fine_tune.check_absent()?;
                Ok(Self::Named(*name))
            }
            ModelSource::Folder(path) => {
                let folder = FineTune::open(path, &options.fine_tune)?;
                if let Some(place) = options.saved_folder() {
                    folder.check_place(place)?;
                    ensure_use!(
                        !matches!(options.files.keep, Keep::Newest(_)),
                        "--keep N is for a file of --save: give last or best with a folder"
                    );
                }
                Ok(Self::Folder(folder))
            }
        }
    }

    /// Opens the samples of the options, and refuses options that do not apply to them.
    pub(super) fn data(&self, options: &TrainOptions) -> Result<Dataset> {
        let TrainOptions { data, sequence, image, seed, .. } = options;
        let wishes = SampleWishes { sequence: *sequence, image: *image, pixels: None };
        let dataset = match self {
            Self::Named(name) => name.data(data, wishes, *seed),
            Self::Folder(folder) => folder.data(data, *sequence, *seed),
        }?;
        ensure_use!(
            sequence.is_none() || matches!(dataset.sample, Sample::Sequence { .. }),
            "--sequence is for text, but --data {data} is not text"
        );
        ensure_use!(
            image.is_none() || !dataset.class_names.is_empty(),
            "--image is for a folder of images, but --data {data} is not one"
        );
        Ok(dataset)
    }

    /// Returns the model's layers for samples of this shape, with the given kind of BatchNorm statistics if any.
    pub(super) fn layers(
        &self,
        sample: &Sample,
        statistics: Option<NormStatistics>,
    ) -> Result<Layers> {
        match self {
            Self::Named(name) => name.layers_normed(sample, DROPOUT, statistics),
            Self::Folder(_) if statistics.is_some() => Err(wrong_use(
                "--batch-norm is for residual networks, but the model is a language model: leave it out"
                    .to_owned(),
            )),
            Self::Folder(folder) => Ok(folder.layers()),
        }
    }

    pub(super) fn folder(&self) -> Option<Arc<FineTune>> {
        match self {
            Self::Named(_) => None,
            Self::Folder(folder) => Some(Arc::clone(folder)),
        }
    }
}
