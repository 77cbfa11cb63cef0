//! Data parallelism over ranks: each runs its own part of the mini-batch, all leave the whole's
//! gradient.
//!
//! ```text
//!   open     how many samples all ranks have, whether they are alike, the step's seed, the size
//!   attempt  each rank runs its part; gradients set out while the last backward still runs
//!   tell     losses and their denominators, or what went wrong: then everyone undoes
//!   prepare  gradients and statistics of all ranks; again, what went wrong is everyone's
//!   commit   they are put in place, which needs no memory
//! ```

mod open;
mod settle;
mod sized;

use std::collections::HashMap;
use std::sync::PoisonError;
use std::time::Instant;

use tch::Tensor;

use super::attempt::Scale;
use super::cut::Cut;
use super::{MicroBatcher, Step, Window};
use crate::auto::Use;
use crate::batch::Batch;
use crate::crew::{StageDevice, drawing};
use crate::oom;
use crate::ranks::{RanksTurn, Trained};
use crate::world::World;
use crate::{Error, Result};
pub(crate) use open::{Opening, join};
pub(crate) use settle::{aside, tell};
pub(crate) use sized::agreed;

impl MicroBatcher {
    /// Trains together with the other ranks of a world, each of which gives its own part of every
    /// mini-batch, or an empty one: a step leaves on all of them the gradient, the loss and the
    /// statistics of all parts together. The variables must have been made by now; all ranks get the
    /// first one's values.
    ///
    /// All ranks make the same calls in the same order. A step in which anything fails on one of
    /// them has failed on all, with an error that names it. An automatic size is the same for all.
    /// Random numbers belong to a step, a rank and a micro-batch, from the first rank's seed.
    /// [`MicroBatcher::map`] and [`MicroBatcher::accumulate`] are each rank's own matter, until
    /// [`MicroBatcher::commit`]; [`MicroBatcher::backward_whole`] needs all samples in one process,
    /// and is refused.
    ///
    /// # Errors
    /// When the ranks have different models, or one is lost.
    pub fn world(mut self, world: &World) -> Result<Self> {
        if world.size() == 1 {
            return Ok(self);
        }
        join(world, self.named())?;
        self.measure_no_layout();
        self.world = Some(world.clone());
        Ok(self)
    }

    /// A step of all ranks.
    pub(super) fn step_together<B: Batch, O: Batch>(
        &mut self,
        world: &World,
        used: Use,
        batch: &B,
        mut attempt: impl FnMut(&mut Self, &mut Cut, Scale) -> Result<(Window, O)>,
        start: Instant,
    ) -> Result<Step<O>> {
        let mut thrown = None;
        let step = drawing(&[StageDevice::from(self.device)], |seed| {
            let trained = (used == Use::Train).then(|| self.what_is_trained());
            let opening = Opening::open(Some(world), used, batch, self.size, seed, trained)?;
            let (step, story) = self.sized_together(world, &opening, |this, ranges| {
                let turn = RanksTurn::begin(world)?;
                this.turn = (used == Use::Train).then(|| turn.clone());
                let mut cut = Cut::given(ranges);
                let attempted = oom::catch(|| attempt(this, &mut cut, opening.scale(0)));
                this.turn = None;
                match attempted {
                    Ok((window, outputs)) => {
                        let step = this.settle_together(world, &turn, window, start)?;
                        let (samples, seed) = (opening.total(), Some(opening.seed()));
                        let peaks = vec![step.peak];
                        Ok((Step { samples, seed, ..step }.with_outputs(outputs), peaks))
                    }
                    Err(caught) => Err(tell(world, aside(caught, &mut thrown), start)),
                }
            })?;
            Ok(step.with_story(story))
        });
        match thrown {
            Some(payload) => std::panic::resume_unwind(payload),
            None => step,
        }
    }

    /// A commit of all ranks.
    pub(super) fn commit_together(
        &mut self,
        world: &World,
        window: Result<Window>,
        start: Instant,
    ) -> Result<Step> {
        let turn = RanksTurn::begin(world)?;
        match window {
            Ok(mut window) => {
                let story = std::mem::take(&mut window.story);
                let step = self.settle_together(world, &turn, window, start)?;
                self.reserved = 0;
                Ok(step.with_story(story))
            }
            Err(error) => Err(tell(world, error, start)),
        }
    }

    /// All variables with their names, in the order of the names.
    fn named(&self) -> Vec<(String, Tensor)> {
        let variables = self.variables.lock().unwrap_or_else(PoisonError::into_inner);
        let named = variables.named_variables.iter();
        let mut named: Vec<_> =
            named.map(|(n, tensor)| (n.clone(), tensor.shallow_clone())).collect();
        named.sort_by(|(a, _), (b, _)| a.cmp(b));
        named
    }

    /// What is trained.
    fn what_is_trained(&self) -> Trained {
        let variables = self.variables.lock().unwrap_or_else(PoisonError::into_inner);
        // Of several names for one place, as of all tensors without numbers, the first counts.
        let mut names: HashMap<usize, &str> = HashMap::new();
        for (name, tensor) in &variables.named_variables {
            let known = names.entry(tensor.data_ptr() as usize).or_insert(name);
            *known = (*known).min(name);
        }
        let trained = variables.trainable_variables.iter().map(|variable| &variable.tensor);
        let trained = trained.filter(|tensor| tensor.requires_grad());
        let name = |tensor: &Tensor| names.get(&(tensor.data_ptr() as usize)).copied();
        Trained::of(trained.map(|tensor| (name(tensor).unwrap_or_default(), tensor)))
    }

    /// What needs all samples in one process.
    pub(super) fn check_alone(&self) -> Result<()> {
        match &self.world {
            Some(world) => Err(Error::NotOverRanks { ranks: world.size() }),
            None => Ok(()),
        }
    }
}
