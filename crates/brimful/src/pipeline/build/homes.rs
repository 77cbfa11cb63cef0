//! Where each stage lives: on its device, or on the host.

use crate::Result;
use crate::pipeline::error::PipelineError;
use crate::schedule::Home;

/// Where the stages' weights, gradients and optimizer state live between their uses.
///
/// A stage that lives on the host computes on its device as others do: its weights come over the bus
/// ahead of their use, its gradients go home when they are whole, and the optimizer works on them
/// there. So a model may be as large as the host's memory. With
/// [breadth first](crate::schedule::Schedule::BreadthFirst), weights cross once forward and once
/// backward, however many micro-batches there are.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Homes {
    /// Every stage on its device.
    #[default]
    Device,
    /// Every stage on the host.
    Host,
    /// One by one, in the order of the stages.
    Each(Vec<Home>),
}

impl Homes {
    /// The home of each of so many stages.
    pub(crate) fn of(&self, stages: usize) -> Result<Vec<Home>> {
        match self {
            Self::Device => Ok(vec![Home::Device; stages]),
            Self::Host => Ok(vec![Home::Host; stages]),
            Self::Each(homes) if homes.len() == stages => Ok(homes.clone()),
            Self::Each(homes) => {
                Err(PipelineError::WrongHomes { given: homes.len(), stages }.into())
            }
        }
    }
}

impl From<Vec<Home>> for Homes {
    fn from(homes: Vec<Home>) -> Self {
        Self::Each(homes)
    }
}

impl<const N: usize> From<[Home; N]> for Homes {
    fn from(homes: [Home; N]) -> Self {
        Self::Each(homes.into())
    }
}
