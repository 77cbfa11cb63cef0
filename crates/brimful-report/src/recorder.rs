//! Records a training loop: a summary of every step, and the actions of a few.

use std::time::Instant;

use super::history::History;
use super::kept::Kept;
use super::{Decided, Device, Ended, Record, Run, Test};
use brimful::Timeline;
use brimful_plan::bytes::Bytes;

/// Largest number of decisions kept: an automatic size has converged long before.
const DECISIONS: usize = 1000;

/// Recorder of a run. Its size does not grow with the number of steps.
#[derive(Debug)]
pub struct Recorder {
    /// Recorded run so far, without its steps.
    run: Run,
    start: Instant,
    history: History,
    kept: Kept,
}

impl Recorder {
    /// Creates a recorder and starts its clock.
    #[must_use]
    pub fn new(title: impl Into<String>) -> Self {
        Self {
            run: Run::new(title),
            start: Instant::now(),
            history: History::default(),
            kept: Kept::default(),
        }
    }

    /// Records a setting, such as an option or the machine.
    pub fn setting(&mut self, name: &str, value: impl ToString) {
        self.run.settings.push((name.to_owned(), value.to_string()));
    }

    /// Records the next device whose peaks the steps report, with its memory limit.
    pub fn device(&mut self, name: impl Into<String>, limit: Option<Bytes>) {
        self.run.devices.push(Device { name: name.into(), limit });
    }

    /// Records a finished step.
    pub fn step(&mut self, step: impl Into<Record>) {
        let mut step = step.into();
        self.history.add(&step, self.start.elapsed().as_secs_f64());
        let number = self.history.steps;
        for decision in &step.decisions {
            self.decided(Decided::new(number, decision));
        }
        self.kept.look(number, &mut step);
    }

    fn decided(&mut self, decided: Decided) {
        let decisions = &mut self.run.decisions;
        if decisions.last().is_some_and(|last| decided.repeats(last)) {
            return;
        }
        if decisions.len() < DECISIONS {
            decisions.push(decided);
        } else {
            self.run.decisions_left_out += 1;
        }
    }

    /// Records a finished test: its loss, and the share of right answers if it is known.
    pub fn test(&mut self, loss: f64, accuracy: Option<f64>) {
        let loss = loss.is_finite().then_some(loss);
        let accuracy = accuracy.filter(|share| share.is_finite());
        self.run.tests.push(Test { step: self.history.steps, loss, accuracy });
    }

    /// Returns the last step's actions, for a pipeline.
    #[must_use]
    pub fn last(&self) -> Option<&Timeline> {
        self.kept.last()
    }

    /// Returns the run as far as it went.
    #[must_use]
    pub fn run(&self, ended: Ended) -> Run {
        Run {
            steps: self.history.columns(self.run.devices.len()),
            timelines: self.kept.compared(),
            ended,
            ..self.run.clone()
        }
    }
}
