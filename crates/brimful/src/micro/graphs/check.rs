//! Check of a CUDA graph: replay a micro-batch, run it eagerly too, and compare the results.

use brimful_torch::memory::empty_cache;

use super::compare::Verdict;
use super::room::Watch;
use super::shape::Closure;
use super::trial::{Eager, ReplayTrial};
use super::trust::Trust;
use super::{MicroGraphs, ShapeEntry, ShapeState, WARM_UP, room};
use crate::batch::Batch;
use crate::loss::{IntoLoss, MicroBatchWeight};
use crate::micro::pass::BatchPass;
use crate::random::Randomness;
use crate::{Error, Result};
use brimful_plan::bytes::Bytes;

impl MicroGraphs {
    /// Replays the micro-batch as a trial, and runs it eagerly for its mini-batch.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfDate`] if the two differ: the closure has changed since the capture, and the step must
    /// rerun without replays.
    pub(super) fn check<B: Batch, R: IntoLoss>(
        &mut self,
        index: usize,
        pass: &mut BatchPass<R::Outputs>,
        micro_batch: B,
        part: &MicroBatchWeight,
        f: &mut impl FnMut(B) -> R,
    ) -> Result<()> {
        // The replay empties the shared sums, which the mini-batch may be using.
        pass.accumulator.disown()?;
        let before = Randomness::of(vec![self.device])?;
        let ShapeEntry { state: ShapeState::Captured(program), trust, shape, .. } =
            &mut self.entries[index]
        else {
            unreachable!("checks are of captured work")
        };
        let closure = shape.closure;
        let trust = *trust;
        let trial = ReplayTrial::of(program, &micro_batch, part, self.device)?;
        before.restore()?;
        let index = self.give_way(index)?;
        let watch = Watch::begin(self.device)?;
        let eager = Eager::run(pass, micro_batch, part, f, self.device)?;
        self.room.pause(&watch)?;
        match trial.against(&eager, pass.accumulator.parameters())? {
            Verdict::Differs(what) => return Err(self.out_of_date(closure, trust, &what)),
            // Non-finite numbers cannot be compared: check again later.
            Verdict::Unknown => {}
            Verdict::Alike => self.entries[index].trust = trust.confirmed(self.step),
        }
        pass.accumulator.add_sums(eager.sums)
    }

    /// Drops all graphs if an eager run of this entry does not fit beside them. The entry is captured anew at
    /// its next micro-batch. Returns the entry's new index.
    fn give_way(&mut self, index: usize) -> Result<usize> {
        let need = self.entries[index].need;
        if room::free_beside(self.device, self.kept().0)? >= need.0 {
            return Ok(index);
        }
        let mut checked = self.entries.swap_remove(index);
        // Drops its graph here, so that the memory can be returned below.
        checked.state = ShapeState::New(WARM_UP);
        checked.need = Bytes(0);
        self.clear_within_step()?;
        empty_cache(self.device)?;
        self.entries.push(checked);
        Ok(0)
    }

    /// Drops graphs that use tensors which no longer exist: the closure must be using others.
    pub(super) fn drop_orphans(&mut self) {
        let left = self.blocks.take_left();
        if left.is_empty() {
            return;
        }
        let is_orphan = |entry: &&ShapeEntry| matches!(&entry.state, ShapeState::Captured(program) if program.uses(&left));
        let orphans = self.entries.iter().filter(is_orphan);
        for (closure, trust) in orphans.map(|e| (e.shape.closure, e.trust)).collect::<Vec<_>>() {
            if !self.give_up(closure, trust) {
                self.report(
                    "a tensor that the closure used when it was captured is gone: hand over tensors \
                     that are replaced from step to step with the batch (`Shared`)"
                        .into(),
                );
            }
        }
    }

    /// Drops graphs that use a tensor which was frozen at the capture and is trained now. They are captured anew
    /// if the backward does not reach it.
    pub(super) fn drop_thawed(&mut self) {
        for entry in &mut self.entries {
            if matches!(&entry.state, ShapeState::Captured(program) if program.is_thawed()) {
                entry.give_up(ShapeState::New(0));
            }
        }
    }

    /// Drops all graphs of the closure. Returns whether they were right for long enough to be captured anew.
    fn give_up(&mut self, closure: Closure, trust: Trust) -> bool {
        let lasted = trust.lasted(self.step);
        for entry in self.entries.iter_mut().filter(|entry| entry.shape.closure == closure) {
            entry.give_up(if lasted { ShapeState::New(0) } else { ShapeState::Eager });
        }
        lasted
    }

    /// Drops all graphs of the closure, logs an error each time, and returns [`Error::OutOfDate`].
    fn out_of_date(&mut self, closure: Closure, trust: Trust, what: &str) -> Error {
        let unchecked = trust.unchecked(self.step);
        let lasted = self.give_up(closure, trust);
        let cause = format!(
            "{what}: the closure does not do what it did when it was captured, because it reads \
             something of the host that changes, such as a factor or a flag; of the steps before this \
             one the last {unchecked} were replayed without a look, and may be wrong"
        );
        tracing::error!(
            unchecked_steps = unchecked,
            captured_anew = lasted,
            "replayed micro-batches are out of date, and the step is run again eagerly: {cause}"
        );
        self.cause = Some(cause);
        Error::OutOfDate
    }
}
