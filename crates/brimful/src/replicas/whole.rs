//! Losses over the whole mini-batch: outputs from all replicas, the loss on the first, and back.
//!
//! ```text
//!   1. every replica   its part forward, without a graph           → the mini-batch's outputs
//!   2. the first one   the loss on all of them, and its backward   → a gradient for each output
//!   3. every replica   its part forward again, with the same random numbers, and backward
//! ```

use std::ops::Range;
use std::sync::Arc;

use tch::Tensor;

use super::Replicas;
use super::attempt::jobs;
use super::replica::{Replica, ReplicaJob};
use crate::auto::Use;
use crate::batch::{Arranged, Batch, BatchError, Samples};
use crate::oom::{self, Caught};
use crate::step::{
    self, Brought, Failed, PartSeed, Parts, RowGradients, Step, StepError, Tried, Try,
};
use crate::{Error, Result};

/// Each replica's part; none where it has no sample.
type Jobs<B> = Vec<Option<ReplicaJob<B>>>;

impl<M: 'static> Replicas<M> {
    /// Runs forward on every micro-batch, the loss on all outputs at once, and backward, as
    /// [`MicroBatcher::backward_whole`](crate::MicroBatcher::backward_whole) does. `loss` gets the
    /// first replica's model, and the outputs on its device.
    ///
    /// # Errors
    /// As [`Replicas::backward`]; and where there are other ranks, because all outputs must be in
    /// one process.
    pub fn backward_whole<B: Batch + 'static, O: Batch + 'static>(
        &mut self,
        batch: &B,
        forward: impl Fn(&M, B) -> O + Send + Sync + 'static,
        loss: impl Fn(&M, &O) -> Tensor + Send + Sync + 'static,
    ) -> Result<Step<O>> {
        step::check_no_window(self)?;
        if !self.state.team.is_alone() {
            return Err(StepError::NotOverRanks { ranks: self.state.team.world.size() }.into());
        }
        let forward = Arc::new(forward);
        let loss = Arc::new(loss);
        let arranged = Arranged::of(batch)?;
        step::run(self, Brought::new(Use::TrainWhole, &arranged), |this, this_try| {
            this.attempt_whole(arranged.batch(), this_try, &forward, &loss)
        })
    }

    fn attempt_whole<B: Batch + 'static, O: Batch + 'static>(
        &self,
        batch: &B,
        this_try: Try<'_>,
        forward: &Arc<impl Fn(&M, B) -> O + Send + Sync + 'static>,
        loss: &Arc<impl Fn(&M, &O) -> Tensor + Send + Sync + 'static>,
    ) -> Result<(Parts, O), Failed> {
        let Try { cut, opening, .. } = this_try;
        let samples = opening.own();
        let shares = self.speeds.shares(samples);
        let size = cut.size().ok_or(Error::from(BatchError::NothingToCut))?;
        let parts = || jobs(batch, samples, &shares, size, |replica| opening.role(replica));
        let outputs = self.outputs(parts()?, samples, Arc::clone(forward))?;
        // The loss draws as if it were one more replica.
        let seed = PartSeed { seed: opening.seed().unwrap_or_default(), part: shares.len() };
        // On the first replica alone: a contrastive loss compares every sample with every other.
        let (tried, gradients) = self.loss_on(&outputs, samples, seed, Arc::clone(loss))?;
        let ready = oom::catch(|| {
            let parts = with_rows(parts()?, &shares, &gradients)?;
            Ok((parts, samples.restored(outputs)?))
        });
        let (tried, (parts, outputs)) = tried.unless_failed(ready)?;
        Ok((self.returned(parts, samples, Arc::clone(forward), tried)?, outputs))
    }

    /// All outputs, on the first replica's device.
    fn outputs<B: Batch + 'static, O: Batch + 'static>(
        &self,
        parts: Jobs<B>,
        samples: &Samples,
        forward: Arc<impl Fn(&M, B) -> O + Send + Sync + 'static>,
    ) -> Result<O, Caught<Error>> {
        let run = move |replica: &mut Replica<M>, job| replica.forward_only(job, &*forward);
        let outputs = self.run(parts, run)?.into_iter().flatten();
        let outputs = outputs.collect::<Result<Vec<O>, _>>()?;
        oom::catch(|| samples.join(outputs))
    }

    /// What the loss adds to the step itself, and each output's gradient.
    fn loss_on<O: Batch + 'static>(
        &self,
        outputs: &O,
        samples: &Samples,
        seed: PartSeed,
        loss: Arc<impl Fn(&M, &O) -> Tensor + Send + Sync + 'static>,
    ) -> Result<(Tried, RowGradients), Caught<Error>> {
        let outputs = outputs.map(&mut |leaf| Ok(leaf.tensor().shallow_clone()))?;
        let samples = samples.clone();
        self.workers.one(0, move |first| {
            Ok(oom::catch(|| first.loss_on(&outputs, &samples, seed, &*loss)))
        })?
    }

    /// All replicas' parts, backward from their outputs' gradients, and the loss's own; undone where
    /// that fails.
    fn returned<B: Batch + 'static, O: Batch + 'static>(
        &self,
        parts: Jobs<(B, RowGradients)>,
        samples: &Samples,
        forward: Arc<impl Fn(&M, B) -> O + Send + Sync + 'static>,
        mut whole: Tried,
    ) -> Result<Parts, Caught<Error>> {
        let back = move |replica: &mut Replica<M>, job: ReplicaJob<(B, RowGradients)>| {
            replica.back(job, &*forward)
        };
        let attempted = self.attempt(parts, samples, &back);
        let added = attempted.and_then(|(Parts { tried: mut parts, figures }, ())| {
            // The loss was counted before: these parts have nothing to add to it.
            parts.tally = whole.tally.following();
            whole.extend(parts)?;
            Ok(figures)
        });
        let (tried, figures) = whole.unless_failed(added)?;
        Ok(Parts { tried, figures })
    }
}

/// Each part with its rows of the gradients.
fn with_rows<B>(
    parts: Jobs<B>,
    shares: &[Range<usize>],
    gradients: &RowGradients,
) -> Result<Jobs<(B, RowGradients)>> {
    let with_rows = |(job, share): (Option<ReplicaJob<B>>, &Range<usize>)| {
        let Some(ReplicaJob { batch, samples, size, role }) = job else { return Ok(None) };
        let batch = (batch, gradients.rows(share)?);
        Ok(Some(ReplicaJob { batch, samples, size, role }))
    };
    parts.into_iter().zip(shares).map(with_rows).collect()
}
