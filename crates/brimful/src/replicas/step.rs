//! A step: every replica runs its part, and then all of it counts, or nothing.

use std::panic;
use std::sync::Arc;
use std::time::Instant;

use super::Replicas;
use super::attempt::{Joined, Kept, Told, errands};
use super::replica::{Done, Errand, Replica};
use super::report::Step;
use crate::auto::{Story, Use};
use crate::batch::{self, Batch};
use crate::crew::drawing;
use crate::micro::Outcome;
use crate::micro::attempt::Scale;
use crate::micro::world::{Opening, aside, tell};
use crate::oom::Caught;
use crate::ranks::RanksTurn;
use crate::world::World;
use crate::{Error, Result};

impl<M: 'static> Replicas<M> {
    /// Runs forward and backward, and adds to the gradients of the first replica exactly what the
    /// plain model would have added on the whole mini-batch.
    ///
    /// The closure gets a replica's model and a micro-batch on its device, and returns its
    /// [`Loss`](crate::Loss), or a pair of the loss and outputs, or a `Result` of one of them. It is
    /// called on all replicas' threads at once.
    ///
    /// # Errors
    /// As [`MicroBatcher::backward`](crate::MicroBatcher::backward): whatever fails on whatever
    /// replica, all is as before. Of several failures the first replica's is told.
    pub fn backward<B: Batch + 'static, R: Outcome + 'static>(
        &mut self,
        batch: &B,
        f: impl Fn(&M, B) -> R + Send + Sync + 'static,
    ) -> Result<Step<R::Outputs>> {
        self.check_no_window()?;
        let f = Arc::new(f);
        let step = self.spread(self.world.clone(), Use::Train, batch, move |replica, part| {
            replica.train(part, &*f)
        })?;
        self.reserved = 0;
        let times = step.times.iter().map(|time| time.map(|time| time.as_secs_f64()));
        self.speeds.observe(step.shares.iter().copied().zip(times));
        Ok(step)
    }

    /// Runs `f` on every micro-batch without gradients, and gives the mini-batch's loss and outputs.
    ///
    /// # Errors
    /// When a micro-batch fails; random state is then as before.
    pub fn evaluate<B: Batch + 'static, R: Outcome + 'static>(
        &mut self,
        batch: &B,
        f: impl Fn(&M, B) -> R + Send + Sync + 'static,
    ) -> Result<Step<R::Outputs>> {
        let f = Arc::new(f);
        self.spread(self.world.clone(), Use::Evaluate, batch, move |replica, part| {
            replica.evaluate(part, &*f)
        })
    }

    /// Runs `f` on every micro-batch without gradients, and joins what it returns in sample order. Where
    /// there are other ranks, it is this one's own matter.
    ///
    /// # Errors
    /// When a micro-batch fails; random state is then as before.
    pub fn map<B: Batch + 'static, O: Batch + 'static>(
        &mut self,
        batch: &B,
        f: impl Fn(&M, B) -> O + Send + Sync + 'static,
    ) -> Result<O> {
        let f = Arc::new(f);
        let work = move |replica: &mut Replica<M>, part| replica.map(part, &*f);
        Ok(self.spread(None, Use::Map, batch, work)?.outputs)
    }

    /// Runs forward and backward, and keeps the result for [`Replicas::commit`]: a step over several
    /// mini-batches, each of which may have its own length. Where there are other ranks, it is this
    /// one's own matter until then.
    ///
    /// # Errors
    /// As [`Replicas::backward`]; the mini-batches before are kept.
    pub fn accumulate<B: Batch + 'static, R: Outcome + 'static>(
        &mut self,
        batch: &B,
        f: impl Fn(&M, B) -> R + Send + Sync + 'static,
    ) -> Result<R::Outputs> {
        self.check_trained()?;
        let f = Arc::new(f);
        let unit = self.window.as_ref().map(|parts| parts.window.unit);
        let place = |opening: &Opening, replica| {
            let Scale { unit: total, first, draws, .. } = opening.scale(replica);
            Scale {
                unit: unit.unwrap_or(total),
                first: first && unit.is_none(),
                last: false,
                draws,
            }
        };
        let work = move |replica: &mut Replica<M>, part| replica.train(part, &*f);
        let end = |this: &mut Self, joined: Joined<_>, _| this.keep(joined);
        let (outputs, opening, story) = self.run(None, Use::Train, batch, place, work, end)?;
        if let Some(parts) = &mut self.window {
            parts.story.extend(story);
            parts.seed = parts.seed.or(Some(opening.seed()));
        }
        Ok(outputs)
    }

    /// Adds the gradients of all mini-batches since the last commit, as if they had been one.
    ///
    /// # Errors
    /// As [`MicroBatcher::commit`](crate::MicroBatcher::commit).
    pub fn commit(&mut self) -> Result<Step> {
        let (start, ranks) = (Instant::now(), self.ranks(self.world.as_ref())?);
        let checked = self.check_trained();
        let window = checked.and_then(|()| self.window.take().ok_or(Error::NothingAccumulated));
        match (window, ranks) {
            (Ok(Kept { window, told, story, seed }), ranks) => {
                let joined = Joined { window, outputs: (), told };
                let step = self.settle(joined, ranks, start)?;
                self.reserved = 0;
                Ok(Step { seed: seed.unwrap_or_default(), ..step }.with_story(story))
            }
            (Err(error), Some((world, _))) => {
                // The others will undo theirs.
                if let Some(Kept { window, .. }) = self.window.take() {
                    window.undo.run()?;
                }
                Err(tell(&world, error, start))
            }
            (Err(error), None) => Err(error),
        }
    }

    /// A window's sums are of the parameters that were trained when it was opened.
    fn check_trained(&self) -> Result<()> {
        let kept = self.window.as_ref();
        kept.map_or(Ok(()), |kept| kept.window.check_trained(&self.store.variables_))
    }

    /// A whole step has no place between the parts of another.
    pub(super) fn check_no_window(&self) -> Result<()> {
        match &self.window {
            Some(kept) => Err(Error::WindowOpen { samples: kept.window.sizes.iter().sum() }),
            None => Ok(()),
        }
    }

    /// Adds a mini-batch to those that have been run but not committed.
    fn keep<O: Batch>(&mut self, joined: Joined<O>) -> Result<O> {
        let Joined { window, outputs, told } = joined;
        let later = window.lasting()?;
        match &mut self.window {
            Some(kept) => {
                kept.window.extend(later)?;
                kept.told = Told::added(&kept.told, told);
            }
            None => {
                let (story, seed) = (Story::default(), None);
                let window = later.opened(&self.store.variables_);
                self.window = Some(Kept { window, told, story, seed });
            }
        }
        Ok(outputs)
    }

    /// A step over one mini-batch, of all these ranks.
    fn spread<B: Batch + 'static, O: Batch + 'static>(
        &mut self,
        world: Option<World>,
        used: Use,
        batch: &B,
        work: impl Fn(&mut Replica<M>, Errand<B>) -> Result<Done<O>> + Clone + Send + 'static,
    ) -> Result<Step<O>> {
        let start = Instant::now();
        let end = |this: &mut Self, joined, ranks| this.settle(joined, ranks, start);
        let (step, opening, story) =
            self.run(world.as_ref(), used, batch, Opening::scale, work, end)?;
        Ok(Step { samples: opening.total(), seed: opening.seed(), ..step }.with_story(story))
    }

    /// Runs a mini-batch until memory suffices on every device, with these ranks.
    fn run<B: Batch + 'static, O: Batch + 'static, T>(
        &mut self,
        world: Option<&World>,
        used: Use,
        batch: &B,
        place: impl Fn(&Opening, usize) -> Scale,
        work: impl Fn(&mut Replica<M>, Errand<B>) -> Result<Done<O>> + Clone + Send + 'static,
        end: impl Fn(&mut Self, Joined<O>, Option<Ranks>) -> Result<T>,
    ) -> Result<(T, Opening, Story)> {
        let (start, devices, mut thrown) = (Instant::now(), self.devices.clone(), None);
        self.crew.involve(batch::devices(batch).into_iter());
        let ended = drawing(&devices, |seed| {
            // Gradients set out after all ranks have told what they train.
            let opening = Opening::open(world, used, batch, self.size, seed, None)?;
            let shares = self.speeds.shares(opening.own());
            let (value, story) = self.sized(world, &opening, &shares, |this, size| {
                let ranks = this.ranks(world)?;
                let parts = errands(batch, &shares, size, |replica| place(&opening, replica));
                match parts.map_err(Caught::Error).and_then(|parts| this.attempt(parts, &work)) {
                    Ok(joined) => {
                        let peaks = joined.peaks();
                        Ok((end(this, joined, ranks)?, peaks))
                    }
                    Err(caught) => {
                        let error = aside(caught, &mut thrown);
                        Err(ranks.map_or(error.clone(), |(world, _)| tell(&world, error, start)))
                    }
                }
            })?;
            Ok((value, opening, story))
        });
        match thrown {
            Some(payload) => panic::resume_unwind(payload),
            None => ended,
        }
    }

    /// The other ranks, and the turn in which all try a step.
    fn ranks(&self, world: Option<&World>) -> Result<Option<Ranks>> {
        let begin = |world: &World| Ok((world.clone(), RanksTurn::begin(world)?));
        world.map(begin).transpose()
    }

    /// Commits the parts on the first replica.
    pub(super) fn settle<O: Batch>(
        &self,
        joined: Joined<O>,
        ranks: Option<Ranks>,
        start: Instant,
    ) -> Result<Step<O>> {
        let peaks = joined.peaks();
        let Joined { window, outputs, told } = joined;
        let sizes = window.sizes.clone();
        let settled = self.crew.one(0, move |first| first.settle(window, ranks, start))?;
        let crate::Step { loss, terms, samples, time, .. } = settled;
        let told = || told.iter().map(Option::as_ref);
        Ok(Step {
            loss,
            terms,
            samples,
            shares: told().map(|told| told.map_or(0, |told| told.samples)).collect(),
            sizes,
            outputs,
            time,
            times: told().map(|told| told.map(|told| told.time)).collect(),
            peaks,
            replayed: told().flatten().map(|told| told.replayed).sum(),
            seed: 0,
            decisions: Vec::new(),
            retries: 0,
        })
    }
}

/// The world, and the turn in which its ranks try a step.
type Ranks = (World, RanksTurn);
