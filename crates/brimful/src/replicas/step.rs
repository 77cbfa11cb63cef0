//! A step: every replica runs its part, and then all of it counts, or nothing.

use std::mem;
use std::ops::Range;
use std::panic;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Replicas;
use super::reduce::reduce;
use super::replica::{Done, Errand, Replica};
use super::report::Step;
use crate::accumulate::Sums;
use crate::auto::Use;
use crate::batch::{self, Batch};
use crate::bytes::Bytes;
use crate::crew::{self, drawing};
use crate::micro::world::{Opening, aside, tell};
use crate::micro::{Outcome, Window};
use crate::oom::{self, Caught};
use crate::ranks::RanksTurn;
use crate::world::World;
use crate::{Error, Result, Size};

/// How a replica's part ended; a replica without a sample has none.
type Ended<O> = Option<Result<Done<O>, Caught<Error>>>;

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
        let f = Arc::new(f);
        let step = self.spread(Use::Train, batch, move |replica, part| replica.train(part, &*f))?;
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
        self.spread(Use::Evaluate, batch, move |replica, part| replica.evaluate(part, &*f))
    }

    /// Runs `f` on every micro-batch without gradients, and joins what it returns in sample order.
    ///
    /// # Errors
    /// When a micro-batch fails; random state is then as before.
    pub fn map<B: Batch + 'static, O: Batch + 'static>(
        &mut self,
        batch: &B,
        f: impl Fn(&M, B) -> O + Send + Sync + 'static,
    ) -> Result<O> {
        let f = Arc::new(f);
        let step = self.spread(Use::Map, batch, move |replica, part| replica.map(part, &*f))?;
        Ok(step.outputs)
    }

    fn spread<B: Batch + 'static, O: Batch + 'static>(
        &mut self,
        used: Use,
        batch: &B,
        work: impl Fn(&mut Replica<M>, Errand<B>) -> Result<Done<O>> + Clone + Send + 'static,
    ) -> Result<Step<O>> {
        let (start, mut thrown) = (Instant::now(), None);
        let devices = self.devices.clone();
        let step = drawing(&devices, |seed| {
            let opening = Opening::open(self.world.as_ref(), used, batch, self.size, seed)?;
            let shares = self.speeds.shares(opening.own());
            let longest = shares.iter().map(ExactSizeIterator::len).max().unwrap_or_default();
            let (step, story) = self.sized(&opening, longest, |this, size| {
                let ranks = this.ranks()?;
                let parts = errands(batch, &shares, size, &opening).map_err(Caught::Error);
                match parts.and_then(|parts| this.attempt(parts, &work)) {
                    Ok(joined) => this.settle(joined, ranks, start),
                    Err(caught) => {
                        let error = aside(caught, &mut thrown);
                        Err(ranks.map_or(error.clone(), |(world, _)| tell(&world, error, start)))
                    }
                }
            })?;
            Ok(Step { samples: opening.total(), seed: opening.seed(), ..step }.with_story(story))
        });
        match thrown {
            Some(payload) => panic::resume_unwind(payload),
            None => step,
        }
    }

    /// The other ranks, and the turn in which all try a step.
    fn ranks(&self) -> Result<Option<Ranks>> {
        let begin = |world: &World| Ok((world.clone(), RanksTurn::begin(world)?));
        self.world.as_ref().map(begin).transpose()
    }

    /// Lets every replica run its part, and puts the parts together. If one fails, all is undone.
    fn attempt<B: Batch + 'static, O: Batch + 'static>(
        &self,
        parts: Vec<Option<Errand<B>>>,
        work: &(impl Fn(&mut Replica<M>, Errand<B>) -> Result<Done<O>> + Clone + Send + 'static),
    ) -> Result<Joined<O>, Caught<Error>> {
        let work = work.clone();
        let run = move |replica: &mut Replica<M>, part: Option<Errand<B>>| {
            Ok(part.map(|part| oom::catch(|| work(replica, part))))
        };
        let ended: Result<Vec<Ended<O>>> =
            self.crew.all(Replica::take_over).and_then(|_| self.crew.each_or_error(parts, run));
        let (mut windows, mut outputs, mut told) = (Vec::new(), Vec::new(), Vec::new());
        for done in all_done(ended.map_err(Caught::Error)?)? {
            told.push(done.as_ref().map(Told::of));
            if let Some(done) = done {
                windows.push(done.window);
                outputs.push(done.outputs);
            }
        }
        let (window, outputs) = self.joined(windows, outputs).map_err(Caught::Error)?;
        Ok(Joined { window, outputs, told })
    }

    /// Commits the parts on the first replica.
    fn settle<O: Batch>(
        &self,
        joined: Joined<O>,
        ranks: Option<Ranks>,
        start: Instant,
    ) -> Result<Step<O>> {
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
            peaks: told().map(|told| told.and_then(|told| told.peak)).collect(),
            seed: 0,
            decisions: Vec::new(),
            retries: 0,
        })
    }

    /// All replicas' parts as one, in their order; undone where that fails.
    fn joined<O: Batch>(&self, mut windows: Vec<Window>, outputs: Vec<O>) -> Result<(Window, O)> {
        let sums = windows.iter_mut().map(|window| mem::take(&mut window.sums)).collect();
        let (sums, addends) = Sums::of_replicas(sums);
        let mut windows = windows.into_iter();
        let mut whole = windows.next().ok_or(Error::EmptyBatch)?;
        whole.sums = sums;
        let joined = oom::catch(|| {
            reduce(&self.crew, addends)?;
            windows.try_for_each(|window| whole.extend(window))?;
            batch::join(outputs)
        });
        match joined {
            Ok(outputs) => Ok((whole, outputs)),
            Err(caught) => {
                whole.undo.run()?;
                Err(crew::of(caught))
            }
        }
    }
}

/// The world, and the turn in which its ranks try a step.
type Ranks = (World, RanksTurn);

/// All replicas' parts of a step.
struct Joined<O> {
    window: Window,
    outputs: O,
    told: Vec<Option<Told>>,
}

/// What a replica tells of its part.
struct Told {
    samples: usize,
    time: Duration,
    peak: Option<Bytes>,
}

impl Told {
    fn of<O>(done: &Done<O>) -> Self {
        Self { samples: done.window.sizes.iter().sum(), time: done.time, peak: done.peak }
    }
}

/// Each replica's samples, cut by the size. The first replica has a part even without a sample: it
/// commits what other ranks have done.
fn errands<B: Batch>(
    batch: &B,
    shares: &[Range<usize>],
    size: Size,
    opening: &Opening,
) -> Result<Vec<Option<Errand<B>>>> {
    let errand = |(replica, share): (usize, &Range<usize>)| {
        if share.is_empty() && replica > 0 {
            return Ok(None);
        }
        let ranges = match share.len() {
            0 => Vec::new(),
            samples => size.cut(samples)?.ok_or(Error::NothingToCut)?,
        };
        let batch = batch::slice(batch, share.clone())?;
        Ok(Some(Errand { batch, ranges, scale: opening.scale(replica) }))
    };
    shares.iter().enumerate().map(errand).collect()
}

/// What all have done, or how the first of those that failed ended: then it is all undone.
fn all_done<O>(ended: Vec<Ended<O>>) -> Result<Vec<Option<Done<O>>>, Caught<Error>> {
    let mut all = Vec::with_capacity(ended.len());
    let mut failure = None;
    for ended in ended {
        match ended.transpose() {
            Ok(done) => all.push(done),
            Err(caught) => failure = failure.or(Some(caught)),
        }
    }
    let Some(failure) = failure else { return Ok(all) };
    for done in all.into_iter().flatten() {
        done.window.undo.run().map_err(Caught::Error)?;
    }
    Err(failure)
}
