//! Computes losses over the whole mini-batch: outputs from all replicas, the loss on the first, and the
//! backward on all.
//!
//! ```text
//!   1. every replica   forward of its part, without a graph                → the mini-batch's outputs
//!   2. the first one   the loss on all outputs, and its backward           → a gradient for each output
//!   3. every replica   recomputation of its part's forward, with the same random numbers, and backward
//! ```

use std::sync::Arc;
use std::time::Instant;

use tch::Tensor;

use super::Replicas;
use super::attempt::jobs;
use super::replica::{Replica, ReplicaJob, in_format};
use crate::auto::Use;
use crate::batch::{Arranged, Batch, BatchError, Samples};
use crate::oom::{self, Caught, into_error_or_panic};
use crate::step::{
    self, AttemptContext, Ending, Failed, PartSeed, Parts, RowGradients, StepError, StepReport,
    StepRequest, StoreAttempt,
};
use crate::{Error, Result, feed};

impl<M: 'static> Replicas<M> {
    /// Runs forward on every micro-batch, the loss on all outputs at once, and backward, as
    /// [`MicroBatcher::backward_whole`](crate::MicroBatcher::backward_whole) does. `loss` gets the first
    /// replica's model, and the outputs on its device.
    ///
    /// # Errors
    /// As [`Replicas::backward`]; and with other ranks, because all outputs must be in one process.
    pub fn backward_whole<B: Batch + 'static, O: Batch + 'static>(
        &mut self,
        batch: &B,
        forward: impl Fn(&M, B) -> O + Send + Sync + 'static,
        loss: impl Fn(&M, &O) -> Tensor + Send + Sync + 'static,
    ) -> Result<StepReport<O>> {
        if !self.state.team.is_alone() {
            return Err(StepError::NotOverRanks { ranks: self.state.team.world.size() }.into());
        }
        let forward = Arc::new(forward);
        let loss = Arc::new(loss);
        let arranged = Arranged::of(batch);
        let request = StepRequest::new(Use::TrainWhole, &arranged);
        step::run(self, request, Ending::Commit, |this, context| {
            this.attempt_whole(arranged.batch(), context, &forward, &loss)
        })
    }

    fn attempt_whole<B: Batch + 'static, O: Batch + 'static>(
        &self,
        batch: &B,
        context: AttemptContext<'_>,
        forward: &Arc<impl Fn(&M, B) -> O + Send + Sync + 'static>,
        loss: &Arc<impl Fn(&M, &O) -> Tensor + Send + Sync + 'static>,
    ) -> Result<(Parts, O), Failed> {
        let AttemptContext { cut, handshake, .. } = context;
        let samples = handshake.own();
        let shares = self.speeds.shares(samples);
        let size = cut.size().ok_or(Error::from(BatchError::NothingToCut))?;
        let parts = || jobs(batch, samples, &shares, size, |replica| handshake.role(replica));
        let outputs = self.outputs(parts()?, samples, Arc::clone(forward))?;
        // The loss draws random numbers as an additional replica would.
        let seed = PartSeed { seed: handshake.seed().unwrap_or_default(), part: shares.len() };
        // The loss runs only on the first replica, because a contrastive loss compares every sample with every
        // other.
        let (attempt, gradients) = self.loss_on(&outputs, samples, seed, Arc::clone(loss))?;
        let ready = oom::catch(|| {
            let pairs = parts()?.into_iter().zip(&shares);
            let with_rows = pairs.map(|(job, share)| match job {
                Some(job) => Ok(Some((job, gradients.rows(share)?))),
                None => Ok(None),
            });
            Ok((with_rows.collect::<Result<Vec<_>>>()?, samples.restored(outputs)?))
        });
        let (attempt, (parts, outputs)) = attempt.unless_failed(ready)?;
        Ok((self.returned(parts, samples, Arc::clone(forward), attempt)?, outputs))
    }

    /// Computes all outputs and gathers them on the first replica's device. Statistics and random state stay
    /// unchanged.
    fn outputs<B: Batch + 'static, O: Batch + 'static>(
        &self,
        parts: Vec<Option<ReplicaJob<B>>>,
        samples: &Samples,
        forward: Arc<impl Fn(&M, B) -> O + Send + Sync + 'static>,
    ) -> Result<O, Caught<Error>> {
        let run = move |replica: &mut Replica<M>, job: ReplicaJob<B>| {
            let Replica { model, micro, main_device, .. } = replica;
            let ran = in_format(micro, |micro| {
                let f = &mut |part| forward(model, part);
                micro.attempt_map(&job.batch, &mut job.cut()?, job.role, f)
            });
            let (attempt, outputs) = ran.map_err(into_error_or_panic)?;
            attempt.undo.run()?;
            feed::moved(&outputs, *main_device)
        };
        let outputs = self.run(parts, run)?.into_iter().flatten();
        let outputs = outputs.collect::<Result<Vec<O>, _>>()?;
        oom::catch(|| samples.join(outputs))
    }

    /// Computes the loss on the first replica; returns the loss's attempt, and each output's gradient.
    fn loss_on<O: Batch + 'static>(
        &self,
        outputs: &O,
        samples: &Samples,
        seed: PartSeed,
        loss: Arc<impl Fn(&M, &O) -> Tensor + Send + Sync + 'static>,
    ) -> Result<(StoreAttempt, RowGradients), Caught<Error>> {
        let outputs = outputs.map(&mut |leaf| Ok(leaf.tensor().shallow_clone()))?;
        let samples = samples.clone();
        self.workers.one(0, move |Replica { model, micro, .. }| {
            Ok(oom::catch(|| {
                let loss = |outputs: &O| loss(model, outputs);
                let ran = micro.attempt_loss(&outputs, &samples, seed, loss);
                let (attempt, gradients) = ran.map_err(into_error_or_panic)?;
                Ok((attempt.off_device(|_| Ok(()))?.0, gradients))
            }))
        })?
    }

    /// Runs all replicas' backwards from their outputs' gradients, and merges them into the loss's attempt; undoes
    /// everything if a backward or the merge fails.
    fn returned<B: Batch + 'static, O: Batch + 'static>(
        &self,
        parts: Vec<Option<(ReplicaJob<B>, RowGradients)>>,
        samples: &Samples,
        forward: Arc<impl Fn(&M, B) -> O + Send + Sync + 'static>,
        mut whole: StoreAttempt,
    ) -> Result<Parts, Caught<Error>> {
        let back = move |replica: &mut Replica<M>, (job, gradients): (_, RowGradients)| {
            let start = Instant::now();
            let ReplicaJob { batch, role, .. } = &job;
            let Replica { model, micro, store, .. } = replica;
            // The loss was computed on the first replica's device.
            let gradients = gradients.on(store.device())?;
            let ran = in_format(micro, |micro| {
                let f = |part| forward(model, part);
                micro.attempt_back(batch, &mut job.cut()?, *role, &gradients, &f)
            });
            let attempt = ran.map_err(into_error_or_panic)?;
            replica.hand_in(attempt, &(), start)
        };
        let attempted = self.attempt(parts, samples, &back);
        let added = attempted.and_then(|(Parts { attempt: mut parts, figures }, ())| {
            // The loss is already counted: these parts add nothing to it.
            parts.tally = whole.tally.following();
            whole.extend(parts)?;
            Ok(figures)
        });
        let (attempt, figures) = whole.unless_failed(added)?;
        Ok(Parts { attempt, figures })
    }
}
