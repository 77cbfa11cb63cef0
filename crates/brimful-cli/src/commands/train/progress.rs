//! What people and programs see while a model trains.

use std::cell::Cell;
use std::io::{self, IsTerminal};

use anyhow::Result;
use brimful::Bytes;
use brimful::auto::{Decision, Why};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use super::{Epoch, Options, Trainer};
use crate::output;

/// A bar on the terminal, a line an epoch on standard output.
#[derive(Debug)]
pub(super) struct Progress {
    bar: ProgressBar,
    json: bool,
    /// The automatic size that was last told of; 0 at first.
    said: Cell<usize>,
}

#[derive(Serialize)]
struct Line<'a> {
    #[serde(flatten)]
    epoch: &'a Epoch,
    done: bool,
}

impl Progress {
    /// Says what is going to be trained.
    pub(super) fn new(options: &Options, trainer: &Trainer) -> Result<Self> {
        let bar = bar(trainer.steps());
        if !options.json {
            output::line(&introduce(options, trainer)?)?;
        }
        Ok(Self { bar, json: options.json, said: Cell::new(0) })
    }

    /// A step is done.
    pub(super) fn step(&self, loss: f64) {
        self.bar.set_message(format!("loss {loss:.4}"));
        self.bar.inc(1);
    }

    /// An epoch is done.
    pub(super) fn finished(&self, epoch: &Epoch, done: bool) -> Result<()> {
        self.bar.reset();
        self.bar.suspend(|| {
            if self.json {
                output::line(&serde_json::to_string(&Line { epoch, done })?)
            } else {
                self.sizing(&epoch.decisions).iter().try_for_each(|text| output::line(text))?;
                output::line(&epoch.to_string())
            }
        })?;
        if done {
            self.bar.finish_and_clear();
        }
        Ok(())
    }

    /// What an automatic size did: what was tried at first, what failed, and what was taken, where
    /// that is new.
    fn sizing(&self, decisions: &[Decision]) -> Vec<String> {
        let is_try = |decision: &&Decision| matches!(decision.why, Why::Probe | Why::Measure);
        let mut lines = Vec::new();
        if self.said.get() == 0 {
            lines.extend(tried(decisions.iter().filter(is_try).collect()));
        }
        let failed = decisions.iter().filter(|decision| decision.failed);
        lines.extend(failed.map(|decision| format!("  memory ran out: {decision}")));
        let taken = decisions.iter().rfind(|decision| !is_try(decision));
        if let Some(Decision { size, why, .. }) = taken
            && self.said.replace(*size) != *size
        {
            lines.push(format!("  took micro-batches of {size}: {why}"));
        }
        lines
    }
}

/// The sizes that were tried, and what the largest of them needed.
fn tried(mut decisions: Vec<&Decision>) -> Option<String> {
    decisions.sort_by_key(|decision| decision.size);
    decisions.dedup_by_key(|decision| decision.size);
    let Decision { size, measured, available, .. } = decisions.last()?;
    let sizes: Vec<String> = decisions.iter().map(|decision| decision.size.to_string()).collect();
    let needed = measured.unwrap_or_default();
    Some(format!(
        "  tried micro-batches of {}: {size} samples needed {needed} of the {available} free",
        sizes.join(", ")
    ))
}

/// A bar with rate and time left; hidden where nobody looks.
fn bar(steps: usize) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} steps  {per_sec}  {eta}  {msg}");
    ProgressBar::new(steps as u64).with_style(style.expect("the template is right"))
}

fn introduce(options: &Options, trainer: &Trainer) -> Result<String> {
    let variables = trainer.engine.variables()?;
    let parameters = variables.iter().filter(|(_, variable)| variable.requires_grad());
    let dataset = trainer.dataset();
    Ok(format!(
        "{}, {} parameters, {}\n{} samples to train on, {} to test on, {}",
        options.model,
        parameters.map(|(_, parameter)| parameter.numel()).sum::<usize>(),
        trainer.engine.place(),
        dataset.train.len(),
        dataset.test.len(),
        dataset.description
    ))
}

impl std::fmt::Display for Epoch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { epoch, loss, test_loss, test_accuracy, peak_bytes, samples_per_s, .. } = self;
        let peak: &Bytes = peak_bytes;
        write!(
            f,
            "epoch {epoch:>3}  loss {loss:.4}  test loss {test_loss:.4}  accuracy {:5.1} %  \
             {samples_per_s:6.0} samples/s  peak {peak}",
            test_accuracy * 100.0
        )
    }
}
