//! What replicas are asked for: every one runs its part, and then all of it counts, or nothing.

use std::sync::Arc;

use super::Replicas;
use super::attempt::jobs;
use super::replica::{PartDone, Replica, ReplicaJob};
use crate::auto::Use;
use crate::batch::{Arranged, Batch, BatchError, Samples};
use crate::step::{self, Brought, Failed, Outcome, Parts, Step, Try};
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
        let f = Arc::new(f);
        let train = move |replica: &mut Replica<M>, job| replica.train(job, &*f);
        let arranged = Arranged::of(batch);
        let step = step::run(self, Brought::new(Use::Train, &arranged), |this, this_try| {
            this.spread(arranged.batch(), this_try, true, &train)
        })?;
        // From steps that went well alone: a failed try tells how fast memory ran out.
        let times = step.times.iter().map(|time| time.map(|time| time.as_secs_f64()));
        // A rank without a sample has taken part in the step all the same.
        let samples = arranged.samples().unwrap_or_default();
        self.speeds.observe(units_of(&step.shares, &samples).into_iter().zip(times));
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
        let evaluate = move |replica: &mut Replica<M>, job| {
            replica.run(job, |micro, model, batch, cut, role| {
                micro.attempt_evaluate(batch, cut, role, &mut |part| f(model, part))
            })
        };
        let arranged = Arranged::of(batch);
        step::run(self, Brought::new(Use::Evaluate, &arranged), |this, this_try| {
            this.spread(arranged.batch(), this_try, true, &evaluate)
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
        let map = move |replica: &mut Replica<M>, job| {
            replica.run(job, |micro, model, batch, cut, role| {
                micro.attempt_map(batch, cut, role, &mut |part| f(model, part))
            })
        };
        let arranged = Arranged::of(batch);
        step::map(self, Brought::new(Use::Map, &arranged), |this, this_try| {
            this.spread(arranged.batch(), this_try, true, &map)
        })
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
        let f = Arc::new(f);
        let train = move |replica: &mut Replica<M>, job| replica.train(job, &*f);
        let arranged = Arranged::of(batch);
        step::accumulate(self, Brought::new(Use::Train, &arranged), |this, this_try| {
            this.spread(arranged.batch(), this_try, false, &train)
        })
    }

    /// Adds the gradients of all mini-batches since the last commit, as if they had been one.
    ///
    /// # Errors
    /// As [`MicroBatcher::commit`](crate::MicroBatcher::commit).
    pub fn commit(&mut self) -> Result<Step> {
        step::commit(self)
    }

    /// One try at a mini-batch, spread over the replicas.
    fn spread<B: Batch + 'static, O: Batch + 'static>(
        &mut self,
        batch: &B,
        this_try: Try<'_>,
        last: bool,
        work: &(impl Fn(&mut Replica<M>, ReplicaJob<B>) -> Result<PartDone<O>> + Clone + Send + 'static),
    ) -> Result<(Parts, O), Failed> {
        let Try { cut, opening, .. } = this_try;
        let samples = opening.own();
        let shares = self.speeds.shares(samples);
        let size = cut.size().ok_or(Error::from(BatchError::NothingToCut))?;
        let role = |replica| step::role(self, opening, replica, last);
        let jobs = jobs(batch, samples, &shares, size, role)?;
        Ok(self.attempt(jobs, samples, work)?)
    }
}

/// What the replicas' parts have: samples, or tokens.
fn units_of(shares: &[usize], samples: &Samples) -> Vec<usize> {
    let mut start = 0;
    let mut units = Vec::with_capacity(shares.len());
    for share in shares {
        units.push(samples.part(&(start..start + share)).units());
        start += share;
    }
    units
}
