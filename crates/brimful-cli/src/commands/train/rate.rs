//! How the learning rate falls, as it is said on the command line.

use std::fmt;

use brimful::optim::RateCurve;
use clap::ValueEnum;

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

impl fmt::Display for Decay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value();
        f.write_str(value.as_ref().map_or("", |value| value.get_name()))
    }
}
