//! Trial of a CUDA graph, to compare it with an eager run. The trial starts from empty sums, draws the eager run's
//! random numbers, and restores all else that it writes.

use std::collections::HashSet;

use brimful_torch::foreach;
use brimful_torch::touched::Touched;
use tch::{Device, Kind, Tensor};

use super::blocks::address;
use super::compare::{Verdict, another, verdict};
use super::program::{Program, watched};
use super::readout::Readout;
use crate::Result;
use crate::accumulate::Sum;
use crate::batch::Batch;
use crate::loss::{IntoLoss, MicroBatchWeight};
use crate::micro::pass::BatchPass;
use crate::random::Randomness;

/// A micro-batch that has run eagerly for its mini-batch, whose gradients are not yet added to the mini-batch's.
#[derive(Debug)]
pub(super) struct Eager {
    pub(super) sums: Vec<Sum>,
    pub(super) touched: Touched,
    /// Leaf that its backward has reached and that is no parameter of the store.
    pub(super) other_leaf: Option<Tensor>,
    readout: Readout,
    /// State of the device's random numbers before and after it. A captured micro-batch draws none on the host,
    /// whose generator all threads share.
    pub(super) before: Randomness,
    pub(super) after: Randomness,
}

impl Eager {
    /// Runs the micro-batch, and counts its loss and outputs.
    pub(super) fn run<B: Batch, R: IntoLoss>(
        pass: &mut BatchPass<R::Outputs>,
        micro_batch: B,
        part: &MicroBatchWeight,
        f: &mut impl FnMut(B) -> R,
        device: Device,
    ) -> Result<Self> {
        let before = Randomness::of(vec![device])?;
        let earlier = pass.accumulator.exchange(Vec::new());
        let (ran, touched) = watched(micro_batch, f, |terms, output| {
            let readout = Readout::of(terms)?;
            // Found before the backward, which frees the autograd graph.
            let other_leaf = pass.other_leaf(terms)?;
            pass.add(terms, &output, part)?;
            Ok((readout, other_leaf))
        })?;
        let (readout, other_leaf) = ran;
        let sums = pass.accumulator.exchange(earlier);
        let after = Randomness::of(vec![device])?;
        Ok(Self { sums, touched, other_leaf, readout, before, after })
    }
}

/// Results of a trial replay.
#[derive(Debug)]
pub(super) struct ReplayTrial {
    sums: Vec<Sum>,
    readout: Readout,
    operations: Vec<String>,
    /// Memory that the graph shares with others.
    blocks: Vec<usize>,
    after: Randomness,
}

impl ReplayTrial {
    /// Replays from empty sums. Restores all else that the replay writes, except random numbers.
    pub(super) fn of(
        program: &mut Program,
        micro_batch: &impl Batch,
        part: &MicroBatchWeight,
        device: Device,
    ) -> Result<Self> {
        // Without these copies, the trial and its eager run would move running statistics and counters twice.
        let before = program.effects.iter().map(Tensor::f_detach_copy);
        let before = before.collect::<Result<Vec<_>, _>>()?;
        program.try_on(micro_batch, part)?;
        let readout = program.readout.copied()?;
        foreach::copy(&program.effects, &before)?;
        let share = |sum: &Sum| sum.iter().map(|s| s.as_ref().map(Tensor::shallow_clone)).collect();
        Ok(Self {
            sums: program.sums.iter().map(share).collect(),
            readout,
            operations: program.operations.clone(),
            blocks: program.blocks.iter().map(address).collect(),
            after: Randomness::of(vec![device])?,
        })
    }

    /// Compares the trial with an eager run. Overwrites the trial's sums.
    pub(super) fn against(&self, eager: &Eager, parameters: &[Tensor]) -> Result<Verdict> {
        if let Some(what) = another(&self.operations, &eager.touched.operations) {
            return Ok(Verdict::Differs(what));
        }
        if let Some(leaf) = &eager.other_leaf {
            let shape = leaf.size();
            let what =
                format!("its backward reaches a tensor of shape {shape:?}, which it did not");
            return Ok(Verdict::Differs(what));
        }
        let Touched { read, written, .. } = &eager.touched;
        let used: HashSet<usize> = read.iter().chain(written).map(address).collect();
        if !self.blocks.iter().all(|block| used.contains(block)) {
            return Ok(Verdict::Differs("it uses another tensor than it did".into()));
        }
        // Half-precision parameters make all other values as coarse, so their dtype sets the tolerance.
        let kind = coarsest(parameters);
        Ok(match verdict(kind, &eager.sums, &eager.readout, &self.sums, &self.readout)? {
            Verdict::Alike if self.after != eager.after => {
                Verdict::Differs("a replay draws other random numbers".into())
            }
            verdict => verdict,
        })
    }
}

/// Returns the parameters' dtype with the fewest digits.
fn coarsest(parameters: &[Tensor]) -> Kind {
    let size = |p: &&Tensor| p.kind().elt_size_in_bytes();
    parameters.iter().min_by_key(size).map_or(Kind::Float, Tensor::kind)
}
