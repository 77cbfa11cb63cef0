//! One worker: a thread's own stages, their variables, and the step that it has under way.

use std::cell::Cell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tch::nn::VarStore;
use tch::{Device, Tensor};

use super::device::StageDevice;
use super::layout::Layout;
use super::run::{Failure, Job, Run};
use super::stage::{Boundary, Pass, Stage};
use super::transfer::{Dock, Tensors};
use super::variables::Variables;
use crate::accumulate::{Accumulator, Finished, Sums};
use crate::bytes::Bytes;
use crate::memory::Memory;
use crate::micro::NonFinite;
use crate::micro::attempt::distinct;
use crate::micro::tally::{Group, Totals};
use crate::optim::Optimizer;
use crate::random::{Dice, Draws};
use crate::schedule::{Kind, Span};
use crate::statistics::{Moved, Pending};
use crate::{Error, Result};

/// What a worker is made from.
#[derive(Debug)]
pub(super) struct Blueprint {
    pub(super) layout: Arc<Layout>,
    pub(super) number: usize,
    pub(super) device: StageDevice,
    /// Of workers that share an accelerator, and so its random numbers.
    pub(super) turn: Option<Arc<Mutex<()>>>,
    pub(super) kind: tch::Kind,
    /// Of the parameters' first values.
    pub(super) seed: u64,
    pub(super) non_finite: NonFinite,
}

/// Where stages run: all that does not change from step to step.
#[derive(Debug)]
pub(super) struct Site {
    pub(super) device: Device,
    pub(super) stages: Vec<Stage>,
    pub(super) dock: Dock,
    pub(super) dice: Dice,
    /// The position of the layer that is running.
    pub(super) layer: Cell<Option<usize>>,
    /// How many layers the whole model has.
    pub(super) model_length: usize,
    layout: Arc<Layout>,
    turn: Option<Arc<Mutex<()>>>,
    trains: bool,
}

/// One thread's part of the pipeline.
pub(super) struct Worker {
    pub(super) number: usize,
    pub(super) site: Site,
    pub(super) variables: Variables,
    pub(super) memory: Option<Memory>,
    pub(super) optimizer: Option<Optimizer>,
    non_finite: NonFinite,
    /// A forward that waits for its backward.
    open: Option<(Run, Pending)>,
    /// A step that was run and not committed.
    attempt: Option<Attempt>,
}

/// What undoes a step, and what commits it.
struct Attempt {
    parameters: Vec<Tensor>,
    sums: Sums,
    statistics: Pending,
    prepared: Option<(Finished, Moved)>,
}

/// What a worker tells of its part of a step.
#[derive(Debug, Default)]
pub(super) struct Told {
    pub(super) spans: Vec<Span>,
    /// Of the worker with the last stage, where there is a loss.
    pub(super) loss: Option<(Totals, Vec<Group>)>,
    /// Gathered outputs, by micro-batch.
    pub(super) outputs: Vec<Vec<Tensor>>,
    pub(super) peak: Option<Bytes>,
}

impl Site {
    /// Runs one of the stages.
    pub(super) fn run(&self, at: usize, input: Boundary, pass: Pass<'_>) -> Boundary {
        let _turn = self.turn();
        self.stages[at].run(input, pass)
    }

    /// Waits until nobody else draws from the same generator.
    pub(super) fn turn(&self) -> Option<MutexGuard<'_, ()>> {
        self.turn.as_ref().map(taken)
    }

    /// Whether a parameter of this worker is trained.
    pub(super) fn trains(&self) -> bool {
        self.trains
    }

    pub(super) fn layer_name(&self, position: usize) -> String {
        self.layout.layers.names().nth(position).unwrap_or_default().to_owned()
    }
}

impl Worker {
    /// Builds the worker's stages, on its own thread.
    pub(super) fn build(blueprint: &Blueprint) -> Result<Self> {
        let Blueprint { layout, number, device, turn, kind, seed, non_finite } = blueprint;
        let (dice, first) = (Dice::new(device.device), Draws::new(*seed, 0));
        let mut store = VarStore::new(device.device);
        let mut stages = Vec::new();
        for (id, plan) in layout.of_worker(*number) {
            let _turn = turn.as_ref().map(taken);
            let before = |position| dice.seed(first.seed(position));
            let built =
                layout.layers.build_range_watched(&store.root(), plan.range.clone(), before);
            stages.push(Stage::new(id, built?, plan));
        }
        if *kind != tch::Kind::Float {
            store.set_kind(*kind);
        }
        let site = Site {
            device: device.device,
            stages,
            dock: Dock::new(device.device),
            dice,
            turn: turn.clone(),
            layer: Cell::new(None),
            model_length: layout.layers.len(),
            layout: Arc::clone(layout),
            trains: true,
        };
        Ok(Self {
            number: *number,
            site,
            variables: Variables::of(&store, layout, *number),
            memory: device.memory(),
            optimizer: None,
            non_finite: *non_finite,
            open: None,
            attempt: None,
        })
    }

    /// Runs a whole step, and keeps what commits or undoes it.
    pub(super) fn attempt(&mut self, job: Job) -> Result<Told, Failure> {
        let run = self.begin(job)?;
        let (statistics, result) = Pending::collect(false, || self.go_on(run, |_| true));
        self.conclude(statistics, result)
    }

    /// Runs the forwards of a step whose loss is not known yet.
    pub(super) fn attempt_forward(&mut self, job: Job) -> Result<Told, Failure> {
        let run = self.begin(job)?;
        let (statistics, result) = Pending::collect(false, || self.go_on(run, is_forward));
        match result {
            Ok(mut run) => {
                let outputs = std::mem::take(&mut run.outputs);
                self.open = Some((run, statistics));
                Ok(Told { outputs, ..Told::default() })
            }
            Err(failure) => self.conclude(statistics, Err(failure)),
        }
    }

    /// Runs the backwards of that step, from these gradients of each micro-batch's outputs.
    pub(super) fn attempt_backward(&mut self, gradients: Vec<Tensors>) -> Result<Told, Failure> {
        let (mut run, statistics) = self.open.take().expect("the pipeline knows that one is open");
        run.output_gradients = gradients;
        let result = self.go_on(run, |_| true);
        self.conclude(statistics, result)
    }

    /// Runs a forward without gradients.
    pub(super) fn evaluate(&mut self, job: Job) -> Result<Told, Failure> {
        let _without = tch::no_grad_guard();
        let run = self.begin(job)?;
        let (_, result) = Pending::collect(false, || self.go_on(run, is_forward));
        let (told, _) = self.tell(result?).map_err(failed)?;
        Ok(told)
    }

    /// Computes all that a commit needs, and gives the gradients that belong to other workers, each
    /// with the variable's name and its owner.
    pub(super) fn prepare(&mut self, factors: &[f64]) -> Result<Vec<(usize, String, Tensor)>> {
        let Some(attempt) = &mut self.attempt else { return Ok(Vec::new()) };
        let moved = attempt.statistics.prepare()?;
        let sums = std::mem::take(&mut attempt.sums);
        let mut finished = sums.finish(&attempt.parameters, factors)?;
        let mut leaving = Vec::new();
        for (variable, gradient) in self.variables.trained().zip(&mut finished.0) {
            if variable.owner != self.number
                && let Some(gradient) = gradient.take()
            {
                leaving.push((variable.owner, variable.name.clone(), gradient));
            }
        }
        attempt.prepared = Some((finished, moved));
        Ok(leaving)
    }

    /// Adds what copies on other workers have gathered.
    pub(super) fn join(&mut self, arriving: Vec<(String, Tensor)>) -> Result<()> {
        let prepared = self.attempt.as_mut().and_then(|attempt| attempt.prepared.as_mut());
        let Some((finished, _)) = prepared else { return Ok(()) };
        for (name, gradient) in arriving {
            let at = self.variables.trained().position(|variable| variable.name == name);
            let Some(sum) = at.map(|at| &mut finished.0[at]) else { continue };
            let gradient = gradient.f_to_device(self.site.device)?;
            *sum = Some(match sum.take() {
                Some(sum) => sum.f_add(&gradient)?,
                None => gradient,
            });
        }
        Ok(())
    }

    /// Lets the step stand. Nothing is allocated.
    pub(super) fn commit(&mut self) -> Result<()> {
        let Some(mut attempt) = self.attempt.take() else { return Ok(()) };
        let Some((finished, moved)) = attempt.prepared.take() else { return Ok(()) };
        finished.apply(&mut attempt.parameters)?;
        moved.apply()
    }

    /// Leaves everything as it was before the step.
    pub(super) fn undo(&mut self) -> Result<()> {
        let statistics = self.open.take().map(|(_, statistics)| statistics);
        let statistics = statistics.or(self.attempt.take().map(|attempt| attempt.statistics));
        statistics.map_or(Ok(()), Pending::undo)
    }

    fn begin(&mut self, job: Job) -> Result<Run, Failure> {
        self.undo().map_err(failed)?;
        if let Some(memory) = &self.memory {
            memory.reset_peak().map_err(failed)?;
        }
        let parameters = self.parameters();
        self.site.trains = !parameters.is_empty();
        let accumulator = job.train.then(|| Accumulator::begin(parameters)).transpose();
        let run = accumulator.and_then(|sums| Run::new(job, &self.site, self.number, sums));
        run.map_err(failed)
    }

    fn parameters(&self) -> Vec<Tensor> {
        self.variables.trained().map(|variable| variable.tensor.shallow_clone()).collect()
    }

    /// Runs on; what it holds is let go where that fails, so that the others stop.
    fn go_on(&mut self, mut run: Run, wanted: impl Fn(Kind) -> bool) -> Result<Run, Failure> {
        run.execute(&mut self.site, wanted)?;
        Ok(run)
    }

    fn conclude(
        &mut self,
        statistics: Pending,
        result: Result<Run, Failure>,
    ) -> Result<Told, Failure> {
        let told = result.and_then(|run| self.tell(run).map_err(failed));
        match told {
            Ok((told, sums)) => {
                let parameters = self.parameters();
                let attempt = Attempt { parameters, sums, statistics, prepared: None };
                self.attempt = Some(attempt);
                Ok(told)
            }
            Err(failure) => {
                statistics.undo().map_err(failed)?;
                Err(failure)
            }
        }
    }

    /// Reads what has to be told of a run that has come to its end.
    fn tell(&self, run: Run) -> Result<(Told, Sums)> {
        let Run { accumulator, tally, outputs, timeline, .. } = run;
        let groups = tally.groups(true);
        let loss = (!groups.is_empty()).then(|| tally.read(self.non_finite)).transpose()?;
        let sums = accumulator.map(Accumulator::finish).transpose()?.unwrap_or_default();
        let peak = self.memory.as_ref().map(|memory| memory.usage()).transpose()?;
        let told = Told {
            spans: timeline.read()?,
            loss: loss.map(|totals| (totals, distinct(&groups))),
            outputs,
            peak: peak.map(|usage| usage.peak),
        };
        Ok((told, sums))
    }
}

/// A turn; a layer that panicked in its own leaves nothing to be feared.
fn taken(turn: &Arc<Mutex<()>>) -> MutexGuard<'_, ()> {
    turn.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_forward(kind: Kind) -> bool {
    kind == Kind::Forward
}

fn failed(error: Error) -> Failure {
    Failure::Failed { at: Instant::now(), error }
}
