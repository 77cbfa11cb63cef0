//! Watches a training loop: every step in short, a few of them action by action.

use std::time::Instant;

use super::history::History;
use super::kept::Kept;
use super::{Decided, Device, Ended, Record, Run, Test};
use crate::bytes::Bytes;
use crate::step::Timeline;

/// The most decisions that are kept: an automatic size has settled long before.
const DECISIONS: usize = 1000;

/// A run that is being recorded. What it keeps does not grow with the number of steps.
#[derive(Debug)]
pub struct Recorder {
    /// What is known so far, apart from steps.
    run: Run,
    start: Instant,
    history: History,
    kept: Kept,
}

impl Recorder {
    /// Starts its clock.
    #[must_use]
    pub fn new(title: impl Into<String>) -> Self {
        Self {
            run: Run::new(title),
            start: Instant::now(),
            history: History::default(),
            kept: Kept::default(),
        }
    }

    /// Something that the run was told, or where it runs.
    pub fn setting(&mut self, name: &str, value: impl ToString) {
        self.run.settings.push((name.to_owned(), value.to_string()));
    }

    /// The next device whose peaks the steps tell, and where its memory ends.
    pub fn device(&mut self, name: impl Into<String>, limit: Option<Bytes>) {
        self.run.devices.push(Device { name: name.into(), limit });
    }

    /// A step is done.
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

    /// A test is done: its loss, and the share of right answers if that is known.
    pub fn test(&mut self, loss: f64, accuracy: Option<f64>) {
        let loss = loss.is_finite().then_some(loss);
        let accuracy = accuracy.filter(|share| share.is_finite());
        self.run.tests.push(Test { step: self.history.steps, loss, accuracy });
    }

    /// The last step's actions, of a pipeline.
    #[must_use]
    pub fn last(&self) -> Option<&Timeline> {
        self.kept.last()
    }

    /// The run as far as it went.
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
