//! Which parameters are trained, in few words that tell them from others: ranks add up gradients one
//! after the other, so all must have the same parameters in the same order.

use std::fmt::{self, Display};

use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::auto::fingerprint;
use crate::world::WorldError;

/// What is trained.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Trained {
    parameters: usize,
    numbers: usize,
    /// Made from names, shapes and kinds, in order.
    print: String,
}

impl Trained {
    /// The parameters that get gradients, by their names, in the order in which they are added up.
    pub(crate) fn of<'a>(named: impl Iterator<Item = (&'a str, &'a Tensor)>) -> Self {
        let (mut parameters, mut numbers, mut lines) = (0, 0, String::new());
        for (name, tensor) in named {
            parameters += 1;
            numbers += tensor.numel();
            lines += &format!("{name} {:?} {:?}\n", tensor.size(), tensor.kind());
        }
        Self { parameters, numbers, print: fingerprint(&lines) }
    }

    /// All of what several have.
    pub(crate) fn all(parts: &[Self]) -> Self {
        let prints: Vec<&str> = parts.iter().map(|part| part.print.as_str()).collect();
        Self {
            parameters: parts.iter().map(|part| part.parameters).sum(),
            numbers: parts.iter().map(|part| part.numbers).sum(),
            print: fingerprint(&prints.join(" ")),
        }
    }

    /// Makes sure that it is the same on all ranks, given in order.
    pub(crate) fn check_alike<'a>(found: impl Iterator<Item = &'a Self>) -> Result<(), WorldError> {
        let found: Vec<&Self> = found.collect();
        if found.iter().all(|other| *other == found[0]) {
            return Ok(());
        }
        let found = found.into_iter().map(Self::to_string).collect();
        Err(WorldError::Differs { what: "what is trained".into(), found })
    }
}

impl Display for Trained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { parameters, numbers, print } = self;
        write!(f, "{parameters} parameters, {numbers} numbers, #{print}")
    }
}
