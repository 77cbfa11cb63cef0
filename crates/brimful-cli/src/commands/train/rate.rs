//! How the learning rate falls, as it is said on the command line.

use brimful::optim::RateCurve;
use clap::ValueEnum;

use crate::setting::shown_as_given;

/// How the learning rate falls to 0 over the whole training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Decay {
    /// Not at all
    None,
    /// In a straight line
    Linear,
    /// By half a cosine: slowly at first and at last
    Cosine,
}

shown_as_given!(Decay);

impl Decay {
    /// The same curve, falling until so many steps are done.
    pub(super) fn applied(self, curve: RateCurve, steps: usize) -> RateCurve {
        match self {
            Self::None => curve,
            Self::Linear => curve.linear(steps),
            Self::Cosine => curve.cosine(steps),
        }
    }
}
