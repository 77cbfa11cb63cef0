//! What becomes of all ranks' parts of a step: all commit, or all undo.

use std::any::Any;
use std::collections::HashMap;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::accumulate::{Finished, Sums, check_dense};
use crate::crew::{self, CrewError};
use crate::memory::Memory;
use crate::micro::tally::{Counted, Group, Totals, distinct};
use crate::micro::{MicroBatcher, Step, Window};
use crate::oom::{self, Caught};
use crate::ranks::{RanksTurn, Trained};
use crate::statistics::{Layer, Moved, Pending};
use crate::world::World;
use crate::{Error, Result};

/// The number of the statistics' sum in a turn, which is none of a bucket's.
const STATISTICS: usize = u32::MAX as usize;

/// What a rank tells of its part.
#[derive(Debug, Serialize, Deserialize)]
struct Told {
    counted: Counted,
    /// Each once.
    groups: Vec<Group>,
    samples: usize,
    trained: Trained,
    /// For each parameter, whether there is a gradient.
    present: Vec<bool>,
    layers: Vec<Layer>,
}

/// What all ranks' parts come to.
struct Whole {
    totals: Totals,
    groups: Vec<Group>,
    samples: f64,
    present: Vec<bool>,
    layers: Vec<Layer>,
}

impl MicroBatcher {
    /// Commits this rank's part if all ranks can commit theirs; else undoes it.
    pub(crate) fn settle_together(
        &mut self,
        world: &World,
        turn: &RanksTurn,
        window: Window,
        start: Instant,
    ) -> Result<Step> {
        let _inside = self.memory.as_ref().and_then(Memory::enter);
        let Window { sums, tally, groups, undo, unit, sizes, peak, .. } = window;
        let mut parameters = self.parameters();
        let totals = undo.settle(|statistics| {
            let told = caught(|| {
                check_dense(&parameters, &self.variables)?;
                Ok(Told {
                    counted: tally.read(self.non_finite)?,
                    groups: distinct(&groups),
                    samples: sizes.iter().sum(),
                    trained: self.what_is_trained(),
                    present: sums.present(parameters.len()),
                    layers: self.layers(statistics),
                })
            });
            let whole = Whole::of(world.settle("the loss", told, start.elapsed())?)?;
            let prepared = caught(|| {
                let gradients = whole.gradients(sums, &parameters, unit, turn)?;
                Ok((gradients, self.statistics(statistics, turn, &whole)?))
            });
            if prepared.is_err() {
                turn.stop();
            }
            let at = match &prepared {
                // What follows from another rank's failure did not come first.
                Err(Error::World(_)) => Duration::MAX,
                _ => start.elapsed(),
            };
            let (vote, prepared) = match prepared {
                Ok(prepared) => (Ok(()), Some(prepared)),
                Err(error) => (Err(error), None),
            };
            world.settle("the gradients", vote, at)?;
            if let Some((gradients, moved)) = prepared {
                gradients.apply(&mut parameters)?;
                moved.apply()?;
            }
            Ok(whole.totals)
        })?;
        self.report(totals.loss, totals.terms, sizes, peak, start)
    }

    /// The running statistics of all ranks' samples.
    fn statistics(
        &self,
        statistics: &mut Pending,
        turn: &RanksTurn,
        whole: &Whole,
    ) -> Result<Moved> {
        let variables: HashMap<String, Tensor> = match &whole.layers[..] {
            [] => HashMap::new(),
            _ => self.named().into_iter().collect(),
        };
        let variable = |name: &str| variables.get(name).map(Tensor::shallow_clone);
        statistics.sum_over_ranks(turn, STATISTICS, whole.layers.iter().cloned(), variable)?;
        statistics.prepare()
    }

    /// The layers that have reported, by their variables' names.
    fn layers(&self, statistics: &Pending) -> Vec<Layer> {
        if !statistics.has_layers() {
            return Vec::new();
        }
        let named = self.named().into_iter();
        let names: HashMap<usize, String> = named.map(|(name, t)| (place(&t), name)).collect();
        statistics.layers(|tensor| names.get(&place(tensor)).cloned())
    }
}

impl Whole {
    fn of(told: Vec<Told>) -> Result<Self> {
        Trained::check_alike(told.iter().map(|told| &told.trained))?;
        let (mut counted, mut groups) = (Counted::default(), Vec::new());
        let (mut samples, mut layers) = (0, Vec::new());
        let mut present = vec![false; told.first().map_or(0, |told| told.present.len())];
        for told in told {
            counted.add(told.counted)?;
            samples += told.samples;
            layers.extend(told.layers);
            if groups.is_empty() {
                groups = told.groups;
            }
            present.iter_mut().zip(told.present).for_each(|(any, has)| *any |= has);
        }
        let (totals, samples) = (counted.totals()?, samples as f64);
        Ok(Self { totals, groups, samples, present, layers })
    }

    /// The gradients of all ranks. In a step of one mini-batch all ranks have divided by the same
    /// unit until now, so that a single group's factor is the same on all.
    fn gradients(
        &self,
        sums: Sums,
        parameters: &[Tensor],
        unit: f64,
        turn: &RanksTurn,
    ) -> Result<Finished> {
        if !self.present.contains(&true) {
            return Ok(Finished(Vec::new()));
        }
        let factor = |group: &Group| self.totals.factor(*group, unit, self.samples);
        let factors: Vec<f64> = self.groups.iter().map(factor).collect();
        let alike = factors.len() <= 1 && unit == self.samples;
        sums.finish_over_ranks(parameters, &factors, alike, turn, &self.present)
    }
}

/// The error of a try; a panic is put aside, to go on when all is undone.
pub(crate) fn aside(failure: Caught<Error>, thrown: &mut Option<Box<dyn Any + Send>>) -> Error {
    match failure {
        Caught::Panic(payload) => {
            let message = crew::words(&*payload);
            *thrown = Some(payload);
            CrewError::Panicked { message }.into()
        }
        other => crew::of(other),
    }
}

/// Tells the others that this rank's try has failed, and gives the error that came first.
pub(crate) fn tell(world: &World, error: Error, start: Instant) -> Error {
    match world.settle::<Told>("the loss", Err(error.clone()), start.elapsed()) {
        Err(first) => first,
        Ok(_) => error,
    }
}

fn caught<T>(f: impl FnOnce() -> Result<T>) -> Result<T> {
    oom::catch(f).map_err(crew::of)
}

fn place(tensor: &Tensor) -> usize {
    tensor.data_ptr() as usize
}
