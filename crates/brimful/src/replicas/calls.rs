//! Calls of replicas: every replica runs its part of an atomic step.

use std::sync::Arc;

use super::Replicas;
use super::attempt::jobs;
use super::replica::{PartDone, Replica, ReplicaJob};
use crate::auto::Use;
use crate::batch::{Arranged, Batch, BatchError, Samples};
use crate::loss::IntoLoss;
use crate::step::{self, AttemptContext, Ending, Failed, Parts, StepReport, StepRequest};
use crate::{Error, Result};

impl<M: 'static> Replicas<M> {
    /// Runs forward and backward, and adds to the gradients of the first replica exactly what the plain
    /// model would have added on the whole mini-batch.
    ///
    /// The closure gets a replica's model and a micro-batch on its device, and returns its
    /// [`Loss`](crate::Loss), or a pair of the loss and outputs, or a `Result` of either. All replicas'
    /// threads call it at once.
    ///
    /// # Errors
    /// As [`MicroBatcher::backward`](crate::MicroBatcher::backward): if any replica fails, everything is as
    /// before. If several fail, the error is that of the first one in the replicas' order.
    pub fn backward<B: Batch + 'static, R: IntoLoss + 'static>(
        &mut self,
        batch: &B,
        f: impl Fn(&M, B) -> R + Send + Sync + 'static,
    ) -> Result<StepReport<R::Outputs>> {
        let f = Arc::new(f);
        let train = move |replica: &mut Replica<M>, job| replica.train(job, &*f);
        let arranged = Arranged::of(batch);
        let request = StepRequest::new(Use::Train, &arranged);
        let step = step::run(self, request, Ending::Commit, |this, context| {
            this.spread(arranged.batch(), context, true, &train)
        })?;
        // Speeds are learnt only from successful steps: the time of a failed attempt shows only how soon memory
        // ran out.
        let times = step.times.iter().map(|time| time.map(|time| time.as_secs_f64()));
        // A rank without a sample takes part in the step too.
        let samples = arranged.samples().unwrap_or_default();
        self.speeds.observe(units_of(&step.shares, &samples).into_iter().zip(times));
        Ok(step)
    }

    /// Runs `f` on every micro-batch without gradients, and returns the mini-batch's loss and outputs.
    ///
    /// # Errors
    /// When a micro-batch fails; random state is then as before.
    pub fn evaluate<B: Batch + 'static, R: IntoLoss + 'static>(
        &mut self,
        batch: &B,
        f: impl Fn(&M, B) -> R + Send + Sync + 'static,
    ) -> Result<StepReport<R::Outputs>> {
        let f = Arc::new(f);
        let evaluate = move |replica: &mut Replica<M>, job| {
            replica.run(job, |micro, model, batch, cut, role| {
                micro.attempt_evaluate(batch, cut, role, &mut |part| f(model, part))
            })
        };
        let arranged = Arranged::of(batch);
        let request = StepRequest::new(Use::Evaluate, &arranged);
        step::run(self, request, Ending::Commit, |this, context| {
            this.spread(arranged.batch(), context, true, &evaluate)
        })
    }

    /// Runs `f` on every micro-batch without gradients, and joins its results in sample order. Other ranks need
    /// not make the same call.
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
        let request = StepRequest::new(Use::Map, &arranged);
        let step = step::run(self, request, Ending::Commit, |this, context| {
            this.spread(arranged.batch(), context, true, &map)
        })?;
        Ok(step.outputs)
    }

    /// Runs forward and backward, and keeps the result for [`Replicas::commit`]: a step over several
    /// mini-batches, which may differ in length. Other ranks take part only in the commit.
    ///
    /// # Errors
    /// As [`Replicas::backward`]; earlier mini-batches are kept.
    pub fn accumulate<B: Batch + 'static, R: IntoLoss + 'static>(
        &mut self,
        batch: &B,
        f: impl Fn(&M, B) -> R + Send + Sync + 'static,
    ) -> Result<R::Outputs> {
        let f = Arc::new(f);
        let train = move |replica: &mut Replica<M>, job| replica.train(job, &*f);
        let arranged = Arranged::of(batch);
        let request = StepRequest::new(Use::Train, &arranged);
        let step = step::run(self, request, Ending::Keep, |this, context| {
            this.spread(arranged.batch(), context, false, &train)
        })?;
        Ok(step.outputs)
    }

    /// Commits the gradients of all mini-batches since the last commit, as if they were one.
    ///
    /// # Errors
    /// As [`MicroBatcher::commit`](crate::MicroBatcher::commit).
    pub fn commit(&mut self) -> Result<StepReport> {
        step::commit(self)
    }

    /// Runs one attempt at a mini-batch, spread over the replicas.
    fn spread<B: Batch + 'static, O: Batch + 'static>(
        &mut self,
        batch: &B,
        context: AttemptContext<'_>,
        last: bool,
        work: &(impl Fn(&mut Replica<M>, ReplicaJob<B>) -> Result<PartDone<O>> + Clone + Send + 'static),
    ) -> Result<(Parts, O), Failed> {
        let AttemptContext { cut, handshake, .. } = context;
        let samples = handshake.own();
        let shares = self.speeds.shares(samples);
        let size = cut.size().ok_or(Error::from(BatchError::NothingToCut))?;
        let role = |replica| step::role(self, handshake, replica, last);
        let jobs = jobs(batch, samples, &shares, size, role)?;
        Ok(self.attempt(jobs, samples, work)?)
    }
}

/// Returns the units of each replica's part: samples, or tokens.
fn units_of(shares: &[usize], samples: &Samples) -> Vec<usize> {
    let mut start = 0;
    let mut units = Vec::with_capacity(shares.len());
    for share in shares {
        units.push(samples.part(&(start..start + share)).units());
        start += share;
    }
    units
}
