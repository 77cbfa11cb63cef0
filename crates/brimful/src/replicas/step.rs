//! A step: every replica runs its part, and then all of it counts, or nothing.

use std::mem;
use std::ops::Range;
use std::panic;
use std::sync::Arc;
use std::time::Instant;

use super::Replicas;
use super::reduce::reduce;
use super::replica::{Done, Errand, Replica};
use super::report::Step;
use crate::accumulate::Sums;
use crate::auto::Use;
use crate::batch::{self, Batch};
use crate::crew::{self, CrewError, drawing};
use crate::micro::attempt::Scale;
use crate::micro::{Outcome, Window};
use crate::oom::{self, Caught};
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
        let start = Instant::now();
        let shares = self.speeds.shares(batch::len(batch)?);
        let longest = shares.iter().map(ExactSizeIterator::len).max().unwrap_or_default();
        let (step, story) = self.sized(used, batch, longest, |this, size| {
            this.try_step(batch, &shares, size, work.clone(), start)
        })?;
        Ok(step.with_story(story))
    }

    /// One try at a step; if it fails, all is as before. A panic goes on after that.
    fn try_step<B: Batch + 'static, O: Batch + 'static>(
        &self,
        batch: &B,
        shares: &[Range<usize>],
        size: Size,
        work: impl Fn(&mut Replica<M>, Errand<B>) -> Result<Done<O>> + Clone + Send + 'static,
        start: Instant,
    ) -> Result<Step<O>> {
        self.crew.all(Replica::take_over)?;
        let mut thrown = None;
        let step = drawing(&self.devices, |seed| {
            let parts = errands(batch, shares, size, seed)?;
            let run = move |replica: &mut Replica<M>, part: Option<Errand<B>>| {
                Ok(part.map(|part| oom::catch(|| work(replica, part))))
            };
            let ended: Result<Vec<Ended<O>>> = self.crew.each_or_error(parts, run);
            let done = all_done(ended?).map_err(|caught| match caught {
                Caught::Panic(payload) => {
                    let message = crew::words(&*payload);
                    thrown = Some(payload);
                    CrewError::Panicked { message }.into()
                }
                other => crew::of(other),
            })?;
            self.settle(done, seed, start)
        });
        match thrown {
            Some(payload) => panic::resume_unwind(payload),
            None => step,
        }
    }

    /// Puts the parts together and commits them on the first replica.
    fn settle<O: Batch>(
        &self,
        done: Vec<Option<Done<O>>>,
        seed: u64,
        start: Instant,
    ) -> Result<Step<O>> {
        let (mut windows, mut outputs) = (Vec::new(), Vec::new());
        let (mut shares, mut times, mut peaks) = (Vec::new(), Vec::new(), Vec::new());
        for done in done {
            let samples = |done: &Done<O>| done.window.sizes.iter().sum();
            shares.push(done.as_ref().map_or(0, samples));
            times.push(done.as_ref().map(|done| done.time));
            peaks.push(done.as_ref().and_then(|done| done.peak));
            if let Some(done) = done {
                windows.push(done.window);
                outputs.push(done.outputs);
            }
        }
        let (window, outputs) = self.joined(windows, outputs)?;
        let sizes = window.sizes.clone();
        let settled = self.crew.one(0, move |first| first.settle(window, start))?;
        let crate::Step { loss, terms, samples, time, .. } = settled;
        let (decisions, retries) = (Vec::new(), 0);
        Ok(Step {
            loss,
            terms,
            samples,
            shares,
            sizes,
            outputs,
            time,
            times,
            peaks,
            seed,
            decisions,
            retries,
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

/// Each replica's samples, cut by the size.
fn errands<B: Batch>(
    batch: &B,
    shares: &[Range<usize>],
    size: Size,
    seed: u64,
) -> Result<Vec<Option<Errand<B>>>> {
    let unit = shares.last().map_or(0, |last| last.end) as f64;
    let errand = |share: &Range<usize>| {
        if share.is_empty() {
            return Ok(None);
        }
        let ranges = size.cut(share.len())?.ok_or(Error::NothingToCut)?;
        let scale = Scale { unit, first: share.start == 0, last: true };
        Ok(Some(Errand { batch: batch::slice(batch, share.clone())?, ranges, scale, seed }))
    };
    shares.iter().map(errand).collect()
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
