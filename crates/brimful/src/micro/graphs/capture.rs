//! Capture of a micro-batch: run it eagerly, capture it, replay it, and compare the replay with the eager run.

use brimful_torch::graph::Pool;
use brimful_torch::stream::Stream;
use tch::Tensor;

use super::compare::Verdict;
use super::program::{self, Program, Setting};
use super::room::{Watch, free_memory};
use super::trial::{Eager, ReplayTrial};
use super::{MicroGraphs, ShapeState, WARM_UP};
use crate::accumulate::Sum;
use crate::batch::{Batch, copied};
use crate::loss::{IntoLoss, MicroBatchWeight};
use crate::micro::pass::BatchPass;
use crate::{Error, Result, device};
use brimful_plan::bytes::Bytes;

impl MicroGraphs {
    /// Runs the micro-batch eagerly for its mini-batch, then captures it and tries a replay. Returns the shape's
    /// new state, and the bytes in use during replays.
    pub(super) fn capture<B: Batch, R: IntoLoss>(
        &mut self,
        pass: &mut BatchPass<R::Outputs>,
        micro_batch: B,
        part: &MicroBatchWeight,
        f: &mut impl FnMut(B) -> R,
    ) -> Result<(ShapeState, Bytes)> {
        // Copied first, because the closure may change its micro-batch.
        let given = copied(&micro_batch)?;
        let mut watch = Watch::begin(self.device)?;
        let eager = Eager::run(pass, micro_batch, part, f, self.device)?;
        // The trial below replays into the shared sums from zero, which would erase the mini-batch's sums.
        pass.accumulator.disown()?;
        let need = watch.eager_need()?;
        let captured = self.capturable(&eager);
        let captured = captured.and_then(|()| self.captured(pass, &given, &eager, need, f));
        let need = self.room.add(&watch, captured.is_ok())?;
        let state = match captured {
            Err(cause) => self.refuse(cause),
            Ok(program) => self.attempt(program, &given, part, &eager, pass)?,
        };
        // The trial has drawn the eager run's random numbers again. The next micro-batch must continue as after
        // one run.
        eager.after.restore()?;
        pass.accumulator.add_sums(eager.sums)?;
        Ok((state, need))
    }

    /// Tries a replay of the captured micro-batch, with the random numbers of the eager run. Returns the shape's
    /// new state.
    fn attempt<O: Batch>(
        &mut self,
        mut program: Program,
        given: &impl Batch,
        part: &MicroBatchWeight,
        eager: &Eager,
        pass: &BatchPass<O>,
    ) -> Result<ShapeState> {
        program.own_memory(&mut self.blocks, &eager.touched);
        eager.before.restore()?;
        let trial = ReplayTrial::of(&mut program, given, part, self.device)?;
        Ok(match trial.against(eager, pass.accumulator.parameters())? {
            // Non-finite numbers cannot be compared: capture another micro-batch later.
            Verdict::Unknown => ShapeState::New(WARM_UP),
            Verdict::Differs(what) => self.refuse(format!("a replay is not an eager run: {what}")),
            Verdict::Alike => ShapeState::Captured(Box::new(program)),
        })
    }

    /// Fails if the eager run did something that a replay would not repeat.
    fn capturable(&self, eager: &Eager) -> Result<(), String> {
        if let Some(leaf) = &eager.other_leaf {
            return Err(format!(
                "its backward reaches a tensor of shape {:?} that is no parameter of the store, whose \
                 gradient a replay would write where it once was: freeze it, or detach what it gives",
                leaf.size()
            ));
        }
        if eager.touched.draws_on_host {
            return Err("it draws random numbers on the host, which would be the same again".into());
        }
        match eager.touched.written.iter().find(|block| block.device() != self.device) {
            Some(block) => Err(format!(
                "it writes to a tensor on {}, which a replay would not do",
                device::name(block.device())
            )),
            None => Ok(()),
        }
    }

    /// Captures a micro-batch like this one, with sums for the gradients that the eager run has reached.
    fn captured<B: Batch, R: IntoLoss>(
        &mut self,
        pass: &mut BatchPass<R::Outputs>,
        micro_batch: &B,
        eager: &Eager,
        need: u64,
        f: &mut impl FnMut(B) -> R,
    ) -> Result<Program, String> {
        let words = |error: Error| error.to_string();
        let stream = self.prepare().map_err(words)?;
        let free = free_memory(self.device, need).map_err(words)?;
        // A mini-batch that also has eager micro-batches needs free memory for one of them too.
        let copies = if self.cramped { 2 } else { 1 };
        if need.saturating_mul(copies) > free {
            return Err(format!(
                "captured, it would keep {}, and {} is free",
                Bytes(need),
                Bytes(free)
            ));
        }
        let sums = self.sums_for(&eager.sums).map_err(words)?;
        let mut capture = |this: &mut Self, sums| {
            let setting = Setting { device: this.device, stream, need };
            Program::capture(&setting, sums, &mut this.pool, pass, micro_batch, f)
        };
        let known = count(&sums);
        let program = capture(self, sums)?;
        if count(&program.sums) == known {
            return Ok(program);
        }
        // A term that counts once per step has no part in most eager micro-batches, but always has one in a
        // capture.
        let sums = self.sums_for(&program.sums).map_err(words)?;
        capture(self, sums)
    }

    /// Creates the stream and the pool that captures need.
    fn prepare(&mut self) -> Result<Stream> {
        let stream = match self.stream {
            Some(stream) => stream,
            None => program::stream(self.device)?,
        };
        self.stream = Some(stream);
        // A pool without a graph cannot be used again.
        if !self.entries.iter().any(|entry| matches!(entry.state, ShapeState::Captured(_))) {
            self.pool = Pool::default();
        }
        Ok(stream)
    }

    /// Returns the sums to which graphs add gradients like these, and allocates the missing ones.
    fn sums_for(&mut self, gradients: &[Sum]) -> Result<Vec<Sum>> {
        while self.sums.len() < gradients.len() {
            self.sums.push((0..self.parameters).map(|_| None).collect());
        }
        let place = |(sum, gradient): (&mut Option<Tensor>, &Option<Tensor>)| {
            let Some(gradient) = gradient else { return Ok(None) };
            if sum.is_none() {
                *sum = Some(gradient.f_zeros_like()?);
            }
            Ok(sum.as_ref().map(Tensor::shallow_clone))
        };
        let groups = self.sums.iter_mut().zip(gradients);
        groups
            .map(|(sums, gradients)| sums.iter_mut().zip(gradients).map(place).collect())
            .collect()
    }
}

fn count(sums: &[Sum]) -> usize {
    sums.iter().flatten().flatten().count()
}
