//! Two families of models: their sizes, their repeated layers, and published results.

use std::fmt;

use brimful::optim::{Method, Sgd};
use brimful_cli::setting::ModelName;
use clap::ValueEnum;

use super::{Experiment, Way};

/// Size that contains every kind of layer of larger models.
pub(super) const TYPICAL: usize = 3;

/// Models that differ only in depth.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Family {
    /// U-Net (B, C)
    Unet,
    /// AmoebaNet-D (L, F)
    Amoebanet,
}

impl Family {
    /// Returns the model of this size, from 1 on.
    pub(super) fn model(self, size: usize, width: i64) -> ModelName {
        match self {
            Self::Unet => ModelName::UNet { blocks: size + 1, channels: width },
            Self::Amoebanet => ModelName::AmoebaNet { cells: 3 * size, filters: width },
        }
    }

    /// Returns the layer of the typical model that costs as much as this one in a model of this size.
    ///
    /// In a U-Net's cell all blocks but the first and the last are alike, in an AmoebaNet's group all cells from
    /// the third on. If each group has a single cell, the reductions are a little smaller than their twins.
    pub(super) fn twin(self, layer: &str, size: usize) -> String {
        let Some((cell, number)) = layer.rsplit_once('.') else { return layer.to_owned() };
        let Ok(number) = number.parse::<usize>() else { return layer.to_owned() };
        let twin = match self {
            Self::Unet if number == size => TYPICAL,
            Self::Unet | Self::Amoebanet => number.min(TYPICAL - 1),
        };
        format!("{cell}.{twin}")
    }

    /// Returns the papers' optimizer, or one that needs as much memory: they used RMSProp for AmoebaNet.
    pub(super) fn method(self) -> Method {
        match self {
            Self::Unet => Sgd::new(0.1).into(),
            Self::Amoebanet => Sgd::new(0.1).momentum(0.9).into(),
        }
    }

    /// Returns the number of parameters that torchgpipe's authors fitted on Tesla P40s, divided by that of
    /// naive-1.
    pub(super) fn published(self, experiment: Experiment) -> Option<f64> {
        let (naive, pipelines) = match self {
            Self::Unet => {
                (362_157_516, [2_213_834_176, 4_993_859_008, 7_802_903_600, 15_822_206_000])
            }
            Self::Amoebanet => {
                (81_505_540, [319_024_120, 542_734_840, 1_055_832_376, 1_844_858_344_u64])
            }
        };
        let place = [1, 2, 4, 8].iter().position(|devices| *devices == experiment.devices)?;
        match experiment.way {
            Way::Naive => Some(1.0),
            Way::Pipeline => Some(pipelines[place] as f64 / f64::from(naive)),
            Way::Offload => None,
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unet => "unet",
            Self::Amoebanet => "amoebanet",
        })
    }
}
