//! Where all micro-batches of a step meet: before a stage that begins with an exact BatchNorm.
//!
//! ```text
//!   F of the stage before   each micro-batch is counted as it is handed on
//!   F of the stage          all are counted: their statistics normalise each one
//!   B of the stage          each brings its share of the gradient of these statistics
//!   B of the stage before   all shares are there: they complete the gradient of each one
//! ```

use tch::Tensor;

use super::backward;
use super::stage::{Boundary, Stage};
use super::transfer::Tensors;
use super::{Stop, WorkerRun};
use crate::Result;
use crate::nn::NormSettled;
use crate::pipeline::error::PipelineError;
use crate::pipeline::worker::Site;
use crate::statistics::WholeBatch;

/// A meeting under way.
#[derive(Debug)]
pub(super) struct Meeting {
    micro_batches: usize,
    /// Those that have been counted.
    arrived: usize,
    whole: WholeBatch,
    /// From the time on when all have been counted.
    settled: Option<NormSettled>,
    /// Those that are back, and the sums of what they bring.
    returned: usize,
    sums: Tensors,
    /// What these come to, from the time on when all are back.
    missing: Option<Tensors>,
}

/// The meeting before each of a worker's stages, where it has one.
pub(super) fn before(stages: &[Stage], micro_batches: usize) -> Vec<Option<Meeting>> {
    let meeting = |stage: &Stage| {
        stage.exact_norm().map(|_| Meeting {
            micro_batches,
            arrived: 0,
            whole: WholeBatch::default(),
            settled: None,
            returned: 0,
            sums: Vec::new(),
            missing: None,
        })
    };
    stages.iter().map(meeting).collect()
}

impl WorkerRun {
    /// Counts what is handed on to a stage that begins with an exact BatchNorm.
    pub(super) fn count_in(&mut self, at: usize, output: &Boundary) -> Result<()> {
        let trains = self.job.mode.trains();
        let next = self.meetings.get_mut(at + 1).and_then(Option::as_mut).filter(|_| trains);
        let (Some(meeting), Some(x)) = (next, output.values.first()) else { return Ok(()) };
        meeting.arrived += 1;
        meeting.whole.add(x)
    }

    /// What enters a stage, with what normalises it where the stage begins with an exact BatchNorm.
    pub(super) fn let_meet(&mut self, site: &Site, at: usize, input: Boundary) -> Result<Boundary> {
        let trains = self.job.mode.trains();
        let meeting = self.meetings[at].as_mut().filter(|_| trains);
        let (Some(meeting), Some(norm)) = (meeting, site.stages[at].exact_norm()) else {
            return Ok(input);
        };
        let Meeting { micro_batches, arrived, .. } = *meeting;
        if arrived < micro_batches {
            return Err(PipelineError::NotAllMet { came: arrived, micro_batches }.into());
        }
        let x = &input.values[0];
        let settled = match meeting.settled.take() {
            Some(settled) => settled,
            None => norm.settle(std::mem::take(&mut meeting.whole), x.kind())?,
        };
        let met = Some(settled.met(x)?);
        meeting.settled = Some(settled);
        Ok(Boundary { met, ..input })
    }

    /// Takes what a micro-batch has brought back to the meeting before its stage out of its gradients. The
    /// last one makes the sums complete, which are the gradients of the BatchNorm's weight and bias.
    pub(super) fn note_probe(
        &mut self,
        site: &Site,
        at: usize,
        gradients: &mut Vec<Tensors>,
    ) -> Result<()> {
        let Some(meeting) = &mut self.meetings[at] else { return Ok(()) };
        let probes = gradients.pop().unwrap_or_default();
        meeting.returned += 1;
        meeting.sums = backward::add(std::mem::take(&mut meeting.sums), probes)?;
        let norm =
            site.stages[at].exact_norm().filter(|_| meeting.returned == meeting.micro_batches);
        let accumulator = self.accumulator.as_mut();
        let (Some(norm), Some(accumulator)) = (norm, accumulator) else { return Ok(()) };
        for (group, sums) in meeting.sums.iter().enumerate() {
            for (place, parameter) in norm.trained() {
                if let Some(Some(sum)) = sums.get(place) {
                    accumulator.add_gradient(group, parameter, sum)?;
                }
            }
        }
        Ok(())
    }

    /// The gradients of a stage's output, with what the statistics of the meeting behind it add.
    pub(super) fn complete(
        &mut self,
        at: usize,
        output: &Boundary,
        mut gradients: Vec<Tensors>,
    ) -> Result<Vec<Tensors>, Stop> {
        let next = self.meetings.get_mut(at + 1).and_then(Option::as_mut);
        let (Some(meeting), Some(x)) = (next, output.values.first()) else { return Ok(gradients) };
        let Meeting { micro_batches, returned, .. } = *meeting;
        if returned < micro_batches {
            let came = returned;
            return Err(crate::Error::from(PipelineError::NotAllMet { came, micro_batches }).into());
        }
        let Some(settled) = &meeting.settled else { return Ok(gradients) };
        if meeting.missing.is_none() {
            let missing =
                |sum: &Option<Tensor>| sum.as_ref().map(|sum| settled.missing(sum)).transpose();
            let groups = meeting.sums.iter().map(|group| group.iter().map(missing).collect());
            meeting.missing = Some(groups.collect::<Result<_>>()?);
        }
        let missing = meeting.missing.iter().flatten();
        for (group, missing) in gradients[0].iter_mut().zip(missing) {
            if let (Some(gradient), [Some(weight), Some(bias)]) = (group.first_mut(), &missing[..])
            {
                *gradient = Some(settled.completed(x, gradient.as_ref(), [weight, bias])?);
            }
        }
        Ok(gradients)
    }
}
