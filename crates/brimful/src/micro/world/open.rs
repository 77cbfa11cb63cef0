//! What ranks tell each other before a step.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::auto::{Kind, Use, fingerprint};
use crate::batch::{self, Batch};
use crate::micro::attempt::{OwnDraws, Scale};
use crate::ranks::Trained;
use crate::world::{World, WorldError};
use crate::{Error, Result, Size};

/// What one rank has.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Part {
    samples: usize,
    /// In words; none where there is no sample.
    kind: Option<String>,
    size: String,
    seed: u64,
    /// Where gradients set out before the step's end.
    trained: Option<Trained>,
}

/// What all ranks have.
#[derive(Debug)]
pub(crate) struct Opening {
    samples: Vec<usize>,
    rank: usize,
    seed: u64,
    /// Of this rank's samples, be they none.
    pub(crate) kind: Kind,
}

impl Opening {
    /// Tells and hears what each has; all ranks draw from the first one's seed. All of them say what
    /// they train, or none does.
    pub(crate) fn open(
        world: Option<&World>,
        used: Use,
        batch: &impl Batch,
        size: Size,
        seed: u64,
        trained: Option<Trained>,
    ) -> Result<Self> {
        let kind = Kind::of(used, batch);
        let Some(world) = world else {
            return Ok(Self { samples: vec![batch::len(batch)?], rank: 0, seed, kind });
        };
        let part = match batch::len(batch) {
            Err(Error::EmptyBatch) => Ok(0),
            other => other,
        };
        let part = part.and_then(|samples| {
            size.cut(samples.max(1))?;
            let kind = (samples > 0).then(|| kind.to_string());
            Ok(Part { samples, kind, size: format!("{size:?}"), seed, trained })
        });
        let parts = world.settle(&format!("{used:?}"), part, Duration::ZERO)?;
        check_alike("the micro-batch size", parts.iter().map(|part| Some(part.size.clone())))?;
        Trained::check_alike(parts.iter().filter_map(|part| part.trained.as_ref()))?;
        check_alike("a sample", parts.iter().map(|part| part.kind.clone()))?;
        let samples: Vec<usize> = parts.iter().map(|part| part.samples).collect();
        if samples.iter().all(|samples| *samples == 0) {
            return Err(Error::EmptyBatch);
        }
        Ok(Self { samples, rank: world.rank(), seed: parts[0].seed, kind })
    }

    /// Samples of all ranks.
    pub(crate) fn total(&self) -> usize {
        self.samples.iter().sum()
    }

    /// Samples of this rank.
    pub(crate) fn own(&self) -> usize {
        self.samples[self.rank]
    }

    pub(crate) fn seed(&self) -> u64 {
        self.seed
    }

    /// The place of this rank's part, or of one of its replicas', in the step.
    pub(crate) fn scale(&self, replica: usize) -> Scale {
        let first = self.samples.iter().position(|samples| *samples > 0) == Some(self.rank);
        let draws = OwnDraws { seed: self.seed, place: self.rank + replica * self.samples.len() };
        let (unit, last) = (self.total() as f64, true);
        Scale { unit, first: first && replica == 0, last, draws: Some(draws) }
    }
}

/// Ranks that have something must have the same.
fn check_alike(what: &str, found: impl Iterator<Item = Option<String>>) -> Result<()> {
    let found: Vec<Option<String>> = found.collect();
    let mut some = found.iter().flatten();
    let first = some.next().cloned();
    if some.all(|other| Some(other) == first.as_ref()) {
        return Ok(());
    }
    let found = found.into_iter().map(|found| found.unwrap_or_else(|| "none".into())).collect();
    Err(WorldError::Differs { what: what.to_owned(), found }.into())
}

/// Makes sure that all ranks have one model, and gives them all the first one's values.
pub(crate) fn join(world: &World, named: Vec<(String, Tensor)>) -> Result<()> {
    world.agree("the model", &outline(&named))?;
    let variables: Vec<Tensor> = named.into_iter().map(|(_, tensor)| tensor).collect();
    world.broadcast(&variables, 0)
}

/// A model in words that tell it from others: how much there is of it, and a number made from its
/// variables' names, shapes and kinds.
fn outline(named: &[(String, Tensor)]) -> String {
    let numbers: usize = named.iter().map(|(_, tensor)| tensor.numel()).sum();
    let lines = named.iter().map(|(name, t)| format!("{name} {:?} {:?}\n", t.size(), t.kind()));
    let print = fingerprint(&lines.collect::<String>());
    format!("of {} variables, {numbers} numbers, #{print}", named.len())
}
