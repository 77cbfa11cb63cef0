//! The micro-batch that is captured: run eagerly, captured, replayed, and both compared.

use brimful_torch::graph::Pool;
use brimful_torch::stream::Stream;
use tch::{Kind, Tensor};

use super::compare::{Buffers, Verdict, verdict};
use super::program::{self, Program, Setting};
use super::readout::Readout;
use super::room::{Watch, make_room};
use super::{Replay, State, WARM_UP};
use crate::accumulate::Sum;
use crate::batch::Batch;
use crate::bytes::Bytes;
use crate::loss::Part;
use crate::micro::Outcome;
use crate::micro::pass::{Pass, forward};
use crate::random::Randomness;
use crate::{Error, Result};

impl Replay {
    /// Runs the micro-batch eagerly, which is what counts, then captures it and tries a replay. Gives
    /// what replays will have in use.
    pub(super) fn capture<B: Batch, R: Outcome>(
        &mut self,
        pass: &mut Pass<R::Outputs>,
        micro_batch: B,
        part: &Part,
        f: &mut impl FnMut(B) -> R,
        buffers: &[Tensor],
    ) -> Result<(State, Bytes)> {
        let mut watch = Watch::begin(self.device)?;
        let before = Randomness::now(self.device)?;
        let earlier = pass.accumulator.exchange(Vec::new());
        let (terms, output) = forward(share(&micro_batch)?, f)?;
        let readout = Readout::of(&terms)?;
        pass.add(&terms, &output, part)?;
        // A graph that is kept would tie the capture to the stream that it was made on.
        drop((terms, output));
        let eager = pass.accumulator.exchange(earlier);
        let after = Randomness::now(self.device)?;

        pass.accumulator.disown()?;
        let need = watch.eager_need()?;
        let captured = self.captured(pass, &micro_batch, &eager, need, f);
        let need = self.room.add(&watch, captured.is_ok())?;
        after.restore()?;
        let state = match captured {
            Err(cause) => self.refuse(cause),
            Ok(mut program) => {
                let buffers = Buffers::save(buffers)?;
                before.restore()?;
                program.try_on(&micro_batch, part)?;
                let same_numbers = Randomness::now(self.device)? == after;
                after.restore()?;
                buffers.restore()?;
                let kind = coarsest(pass.accumulator.parameters());
                let (sums, row) = (program.sums(), program.readout());
                match verdict(kind, &eager, &readout, sums, row)? {
                    // Numbers that are not finite cannot be compared: another time.
                    Verdict::Unknown => State::New(WARM_UP),
                    Verdict::Differs(what) => self.refuse(what),
                    Verdict::Alike if !same_numbers => {
                        self.refuse("a replay draws other random numbers".into())
                    }
                    Verdict::Alike => State::Captured(Box::new(program)),
                }
            }
        };
        pass.accumulator.add_sums(eager)?;
        Ok((state, need))
    }

    /// Captures a micro-batch like this one, with sums for what eager runs have reached.
    fn captured<B: Batch, R: Outcome>(
        &mut self,
        pass: &mut Pass<R::Outputs>,
        micro_batch: &B,
        eager: &[Sum],
        need: u64,
        f: &mut impl FnMut(B) -> R,
    ) -> Result<Program, String> {
        let words = |error: Error| error.to_string();
        let stream = self.prepare().map_err(words)?;
        let free = make_room(self.device, need).map_err(words)?;
        let copies = if self.cramped { 2 } else { 1 };
        if need.saturating_mul(copies) > free {
            let (need, free) = (Bytes(need), Bytes(free));
            return Err(format!("captured, it would keep {need}, and {free} is free"));
        }
        let sums = self.sums_for(eager).map_err(words)?;
        let mut capture = |this: &mut Self, sums| {
            let setting = Setting { device: this.device, stream, need };
            Program::capture(&setting, sums, &mut this.pool, pass, micro_batch, f)
        };
        let known = count(&sums);
        let program = capture(self, sums)?;
        if count(program.sums()) == known {
            return Ok(program);
        }
        // A term that counts once a step has no part in most eager micro-batches, but has one here.
        let sums = self.sums_for(program.sums()).map_err(words)?;
        capture(self, sums)
    }

    /// Makes what captures need: a stream, and a pool.
    fn prepare(&mut self) -> Result<Stream> {
        let stream = match self.stream {
            Some(stream) => stream,
            None => program::stream(self.device)?,
        };
        self.stream = Some(stream);
        // A pool that nobody uses any more cannot be taken up again.
        if !self.entries.iter().any(|entry| matches!(entry.state, State::Captured(_))) {
            self.pool = Pool::default();
        }
        Ok(stream)
    }

    /// What captured work is to add such gradients to.
    fn sums_for(&mut self, gradients: &[Sum]) -> Result<Vec<Sum>> {
        while self.sums.len() < gradients.len() {
            self.sums.push(self.parameters.iter().map(|_| None).collect());
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

fn share<B: Batch>(micro_batch: &B) -> Result<B> {
    micro_batch.map(&mut |leaf| Ok(leaf.tensor().shallow_clone()))
}

/// The kind of number with the fewest digits among the parameters.
fn coarsest(parameters: &[Tensor]) -> Kind {
    let size = |p: &&Tensor| p.kind().elt_size_in_bytes();
    parameters.iter().min_by_key(size).map_or(Kind::Float, Tensor::kind)
}

fn count(sums: &[Sum]) -> usize {
    sums.iter().flatten().flatten().count()
}
