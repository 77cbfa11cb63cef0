//! Runs all replicas' parts of a mini-batch at once, and merges them or undoes them all.

use std::mem;
use std::ops::Range;

use super::Replicas;
use super::reduce::reduce;
use super::replica::{PartDone, Replica, ReplicaJob};
use crate::accumulate::Sums;
use crate::batch::{self, Batch, BatchError, Samples};
use crate::oom::{self, Caught, into_error};
use crate::step::{BatchRole, MicroBatches, Parts, StoreAttempt};
use crate::{Error, Result};

/// Result of a replica's part; none for a replica without a sample.
type Ended<T> = Option<Result<T, Caught<Error>>>;

impl<M: 'static> Replicas<M> {
    /// Runs every replica's part, and merges the parts. If one fails, undoes all.
    pub(super) fn attempt<J: Send + 'static, O: Batch + 'static>(
        &self,
        jobs: Vec<Option<J>>,
        samples: &Samples,
        work: &(impl Fn(&mut Replica<M>, J) -> Result<PartDone<O>> + Clone + Send + 'static),
    ) -> Result<(Parts, O), Caught<Error>> {
        let mut parts = Vec::new();
        let mut outputs = Vec::new();
        let mut figures = Vec::new();
        for done in all_done(self.run(jobs, work.clone())?)? {
            figures.push(done.as_ref().map(|done| done.figures).filter(|part| part.samples > 0));
            if let Some(done) = done {
                parts.push(done.attempt);
                outputs.push(done.outputs);
            }
        }
        let (attempt, outputs) = self.joined(parts, outputs, samples)?;
        Ok((Parts { attempt, figures }, outputs))
    }

    /// Copies the first replica's variables to the others, and runs every replica's part.
    pub(super) fn run<J: Send + 'static, T: Send + 'static>(
        &self,
        jobs: Vec<Option<J>>,
        work: impl Fn(&mut Replica<M>, J) -> Result<T> + Clone + Send + 'static,
    ) -> Result<Vec<Ended<T>>, Caught<Error>> {
        let run = move |replica: &mut Replica<M>, job: Option<J>| {
            Ok(job.map(|job| oom::catch(|| work(replica, job))))
        };
        // Copied before every attempt, not after every step, because an optimizer, the user or a load may change
        // the first replica's variables in between.
        self.workers.all(Replica::take_over)?;
        Ok(self.workers.each_or_error(jobs, run)?)
    }

    /// Merges all replicas' parts, in their order; undoes the parts if the merge fails.
    fn joined<O: Batch>(
        &self,
        mut parts: Vec<StoreAttempt>,
        outputs: Vec<O>,
        samples: &Samples,
    ) -> Result<(StoreAttempt, O)> {
        let sums = parts.iter_mut().map(|part| mem::take(&mut part.sums)).collect();
        let (sums, addends) = Sums::of_replicas(sums);
        let mut parts = parts.into_iter();
        let mut whole = parts.next().ok_or(BatchError::Empty)?;
        // The first replica's device holds all sums, and may run out of memory here though every part
        // fitted.
        let joined = oom::catch(|| {
            reduce(&self.workers, addends)?;
            whole.sums = self.on_main_device(sums)?;
            parts.try_for_each(|part| whole.extend(part))?;
            // A rank without a sample has undefined outputs, of its first replica alone.
            let outputs = match <[O; 1]>::try_from(outputs) {
                Ok([one]) => one,
                Err(several) => samples.join(several)?,
            };
            samples.restored(outputs)
        });
        whole.unless_failed(joined.map_err(into_error))
    }

    /// Transfers the sums to the first replica's device, on its own thread.
    fn on_main_device(&self, sums: Sums) -> Result<Sums> {
        let main = self.device();
        if sums.are_on(main) { Ok(sums) } else { self.workers.one(0, move |_| sums.on(main)) }
    }
}

/// Creates each replica's job from its share of the samples. The first replica has a job even without a sample:
/// it commits the sums of the other ranks.
pub(super) fn jobs<B: Batch>(
    batch: &B,
    samples: &Samples,
    shares: &[Range<usize>],
    size: MicroBatches,
    mut role: impl FnMut(usize) -> BatchRole,
) -> Result<Vec<Option<ReplicaJob<B>>>> {
    let job = |(replica, share): (usize, &Range<usize>)| {
        if share.is_empty() && replica > 0 {
            return Ok(None);
        }
        let batch = batch::slice(batch, share.clone())?;
        Ok(Some(ReplicaJob { batch, samples: samples.part(share), size, role: role(replica) }))
    };
    shares.iter().enumerate().map(job).collect()
}

/// Returns all results, or the failure of the first replica that failed, after undoing all parts.
fn all_done<O>(ended: Vec<Ended<PartDone<O>>>) -> Result<Vec<Option<PartDone<O>>>, Caught<Error>> {
    let mut all = Vec::with_capacity(ended.len());
    let mut failure = None;
    for ended in ended {
        match ended.transpose() {
            Ok(done) => all.push(done),
            Err(caught) => failure = failure.or(Some(caught)),
        }
    }
    let Some(failure) = failure else { return Ok(all) };
    // Successful parts are undone too, because a step is atomic. A failed undo does not stop the undo of other
    // parts.
    let undone = all.into_iter().flatten().map(|done| done.attempt.undo.run());
    undone.fold(Ok(()), Result::and)?;
    Err(failure)
}
