//! One worker's try at a step: its actions, and what commits or undoes them.

use std::time::Instant;

use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::job::Job;
use super::run::{Failure, Run};
use super::transfer::Tensors;
use super::variables::Variable;
use super::worker::Worker;
use crate::accumulate::{Accumulator, Finished, Sums};
use crate::bytes::Bytes;
use crate::micro::attempt::Undo;
use crate::micro::tally::{Counted, Group, distinct};
use crate::random::Randomness;
use crate::ranks::RanksTurn;
use crate::schedule::{Kind, Span};
use crate::statistics::{Layer, Moved, Pending};
use crate::{Error, Result, crew, oom};

/// A step that was run, of which nothing is committed yet.
pub(super) struct Attempt {
    pub(super) parameters: Vec<Tensor>,
    pub(super) sums: Sums,
    pub(super) undo: Undo,
    /// Where the sums are added to those of other pipelines, if there are such.
    pub(super) summing: Option<RanksTurn>,
    pub(super) prepared: Option<(Finished, Moved)>,
}

/// What a worker tells of its part of a step.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Told {
    pub(super) spans: Vec<Span>,
    /// Of the worker with the last stage, where there is a loss.
    pub(super) loss: Option<(Counted, Vec<Group>)>,
    /// Gathered outputs, by micro-batch; other ranks are not told.
    #[serde(skip)]
    pub(super) outputs: Vec<Vec<Tensor>>,
    pub(super) peak: Option<Bytes>,
    /// Which of its parameters have got gradients, and which of its layers have statistics.
    pub(super) present: Vec<bool>,
    pub(super) layers: Vec<Layer>,
}

/// Running statistics that nobody reports, each with a copy of what it was.
type Foreign = Vec<(Tensor, Tensor)>;

impl Worker {
    /// Runs a whole step, and keeps what commits or undoes it.
    pub(super) fn attempt(&mut self, job: Job) -> Result<Told, Failure> {
        let (mut run, foreign) = self.begin(job)?;
        run.accumulator = Some(self.accumulator(&run).map_err(failed)?);
        let (undo, result) = self.collecting(run, foreign, |_| true);
        self.conclude(undo, result)
    }

    /// Runs the forwards of a step whose loss is not known yet.
    pub(super) fn attempt_forward(&mut self, job: Job) -> Result<Told, Failure> {
        let (run, foreign) = self.begin(job)?;
        match self.collecting(run, foreign, is_forward) {
            (undo, Ok(mut run)) => {
                let outputs = std::mem::take(&mut run.outputs);
                self.open = Some((run, undo));
                Ok(Told { outputs, ..Told::default() })
            }
            (undo, failed) => self.conclude(undo, failed),
        }
    }

    /// Runs the backwards of that step, from these gradients of each micro-batch's outputs.
    pub(super) fn attempt_backward(&mut self, gradients: Vec<Tensors>) -> Result<Told, Failure> {
        let (mut run, undo) = self.open.take().expect("the pipeline knows that one is open");
        run.output_gradients = gradients;
        // Not before: what the caller does to gradients and parameters since the forward counts.
        let result = self.accumulator(&run).map_err(failed).and_then(|accumulator| {
            run.accumulator = Some(accumulator);
            self.go_on(run, |_| true)
        });
        self.conclude(undo, result)
    }

    /// Takes part in a step in which other pipelines have all micro-batches.
    pub(super) fn idle(&mut self, summing: Option<RanksTurn>) -> Result<Told> {
        self.undo()?;
        let (parameters, sums, undo) = (self.parameters(), Sums::default(), Undo::default());
        let present = sums.present(parameters.len());
        self.attempt = Some(Attempt { parameters, sums, undo, summing, prepared: None });
        Ok(Told { present, ..Told::default() })
    }

    /// Runs a forward without gradients.
    pub(super) fn evaluate(&mut self, job: Job) -> Result<Told, Failure> {
        let _without = tch::no_grad_guard();
        let (run, foreign) = self.begin(job)?;
        let (_, result) = self.collecting(run, foreign, is_forward);
        let (told, _) = self.tell(result?).map_err(failed)?;
        Ok(told)
    }

    fn begin(&mut self, job: Job) -> Result<(Run, Foreign), Failure> {
        self.undo().and_then(|()| self.prepared_run(job)).map_err(failed)
    }

    fn prepared_run(&mut self, job: Job) -> Result<(Run, Foreign)> {
        if let Some(memory) = &self.memory {
            memory.reset_peak()?;
        }
        let parameters = self.parameters();
        self.site.trains = !parameters.is_empty();
        if !job.train {
            return Ok((Run::new(job, self)?, Vec::new()));
        }
        let foreign = self.foreign.save(&self.store.variables_)?;
        self.site.foreign = foreign.iter().map(|(running, _)| running.data()).collect();
        Ok((Run::new(job, self)?, foreign))
    }

    /// Collects the run's gradients, apart from those that are there.
    fn accumulator(&self, run: &Run) -> Result<Accumulator> {
        let accumulator = Accumulator::begin(self.parameters(), &self.store.variables_)?;
        Ok(accumulator.summing(run.job.summing.clone()))
    }

    fn parameters(&self) -> Vec<Tensor> {
        self.variables.trained().map(|variable| variable.tensor.shallow_clone()).collect()
    }

    /// Runs on while the layers' statistics are collected.
    fn collecting(
        &mut self,
        run: Run,
        foreign: Foreign,
        wanted: impl Fn(Kind) -> bool,
    ) -> (Undo, Result<Run, Failure>) {
        let (statistics, result) = Pending::collect(false, || self.go_on(run, wanted));
        // A step's random numbers are its own: nothing of them is to be put back.
        let randomness = Randomness::default();
        (Undo { statistics, randomness, foreign }, result)
    }

    /// Runs on; what it holds is let go where that fails, so that the others stop.
    fn go_on(&mut self, mut run: Run, wanted: impl Fn(Kind) -> bool) -> Result<Run, Failure> {
        run.execute(&mut self.site, wanted)?;
        Ok(run)
    }

    fn conclude(&mut self, undo: Undo, result: Result<Run, Failure>) -> Result<Told, Failure> {
        let summing = result.as_ref().ok().and_then(|run| run.job.summing.clone());
        // Those that the sums are of: others may be trained by the time of the commit.
        let parameters = result.as_ref().ok().and_then(|run| run.accumulator.as_ref());
        let parameters = parameters.map_or_else(Vec::new, |accumulator| {
            accumulator.parameters().iter().map(Tensor::shallow_clone).collect()
        });
        let told = result.and_then(|run: Run| {
            let told = oom::catch(|| {
                self.foreign.judge(&undo.statistics, &undo.foreign, run.micro_batches());
                self.tell(run).map(|(told, sums)| (self.tell_sums(told, &undo, &sums), sums))
            });
            told.map_err(|caught| failed(crew::of(caught)))
        });
        match told {
            Ok((told, sums)) => {
                self.attempt = Some(Attempt { parameters, sums, undo, summing, prepared: None });
                Ok(told)
            }
            Err(failure) => {
                undo.run().map_err(failed)?;
                Err(failure)
            }
        }
    }

    /// Reads what has to be told of a run that has come to its end.
    fn tell(&self, run: Run) -> Result<(Told, Sums)> {
        let Run { accumulator, tally, outputs, timeline, norms, .. } = run;
        let groups = tally.groups(true);
        let loss = (!groups.is_empty()).then(|| tally.read(self.non_finite)).transpose()?;
        check_finite(&norms)?;
        let sums = accumulator.map(Accumulator::finish).transpose()?.unwrap_or_default();
        let peak = self.memory.as_ref().map(|memory| memory.usage()).transpose()?;
        let told = Told {
            spans: timeline.read()?,
            loss: loss.map(|counted| (counted, distinct(&groups))),
            outputs,
            peak: peak.map(|usage| usage.peak),
            ..Told::default()
        };
        Ok((told, sums))
    }

    /// What the same worker of other pipelines must know to add its own.
    fn tell_sums(&self, told: Told, undo: &Undo, sums: &Sums) -> Told {
        let of = |tensor: &Tensor| {
            let same = |v: &&Variable| v.tensor.data_ptr() == tensor.data_ptr();
            self.variables.all().find(same).map(|variable| variable.name.clone())
        };
        let parameters = self.variables.trained().count();
        Told { present: sums.present(parameters), layers: undo.statistics.layers(of), ..told }
    }
}

/// The gradients' norms after each backward, read at once, must be numbers.
fn check_finite(norms: &[(usize, Tensor)]) -> Result<()> {
    if norms.is_empty() {
        return Ok(());
    }
    let all: Vec<&Tensor> = norms.iter().map(|(_, norm)| norm).collect();
    let numbers = Vec::<f64>::try_from(Tensor::f_stack(&all, 0)?.f_to_kind(tch::Kind::Double)?)?;
    let mut read = norms.iter().zip(numbers);
    match read.find(|(_, number)| !number.is_finite()) {
        Some(((micro_batch, _), _)) => Err(Error::NonFiniteGradient { micro_batch: *micro_batch }),
        None => Ok(()),
    }
}

fn is_forward(kind: Kind) -> bool {
    kind == Kind::Forward
}

fn failed(error: Error) -> Failure {
    Failure::Failed { at: Instant::now(), error }
}
