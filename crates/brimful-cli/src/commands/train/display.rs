//! Progress of a training, as text or as JSON. After an interruption, tells what is saved and how to resume.

use std::path::Path;
use std::{env, fmt, mem};

use anyhow::Result;
use brimful::Bytes;
use brimful::auto::{Decision, Why};
use brimful::nn::Lora;
use brimful_report::Record;
use serde::Serialize;
use tch::Tensor;

use super::{Epoch, Trainer};
use crate::log_files::TestFigures;
use crate::named::Named;
use crate::output;
use crate::progress::{self, Progress, Ticker};
use crate::shell::quoted;

/// Display of a training: a bar on the terminal, and a line on standard output for each epoch.
#[derive(Debug)]
pub(super) struct Display {
    progress: Progress,
    /// Memory limit of each device, if there is one.
    limit: Option<Bytes>,
    /// Last automatic size that was printed; 0 at first.
    said: usize,
}

#[derive(Serialize)]
struct JsonLine<'a, T> {
    #[serde(flatten)]
    told: &'a T,
    done: bool,
}

impl Display {
    /// Starts the display with an introduction to the training.
    pub(super) fn new(trainer: &Trainer) -> Result<Self> {
        // Every rank takes part, because the model's variables may be spread over the ranks.
        let introduction = introduce(trainer)?;
        if !trainer.options.json && trainer.is_first() {
            output::prose(&introduction)?;
        }
        if trainer.is_first() && trainer.is_over() {
            progress::say(&format!("brimful: nothing to do: {}", trainer.why_over()));
        }
        let samples = trainer.samples_to_do();
        Ok(Self {
            progress: Progress::new(samples, "samples").starting_at(trainer.samples_done()),
            limit: trainer.engine.devices().into_iter().find_map(|device| device.limit),
            said: 0,
        })
    }

    /// Returns a handle that counts samples while a step is running.
    pub(super) fn ticker(&self) -> Ticker {
        self.progress.ticker()
    }

    /// Shows a step that is done.
    pub(super) fn step(&self, step: &Record, trainer: &Trainer) {
        let Record { loss, micro_batch, .. } = step;
        let epochs = trainer.options.length.epochs(trainer.steps());
        let epoch = trainer.state.epoch + 1;
        let peak = step.peak();
        let limit = self.limit.map_or_else(String::new, |limit| format!(" of {limit}"));
        self.progress.doing(format!(
            "epoch {epoch}/{epochs}  micro-batch size {micro_batch}  {peak}{limit}  loss {loss:.4}"
        ));
        // Corrects the count, because repeated steps count some samples twice.
        self.progress.reach(trainer.samples_done());
    }

    /// Prints an epoch that is done.
    pub(super) fn finished(&mut self, epoch: &Epoch, trainer: &Trainer) -> Result<()> {
        if trainer.is_first() && !trainer.options.json {
            self.sizing(&epoch.decisions, trainer.unit_of_sizes())
                .iter()
                .try_for_each(|text| output::prose(text))?;
        }
        tell(epoch, trainer)
    }

    /// Describes the choice of an automatic size: the sizes at which memory ran out, and the size taken, if it is
    /// new. The first description also lists the sizes that were probed.
    fn sizing(&mut self, decisions: &[Decision], unit: &str) -> Vec<String> {
        let is_try = |decision: &&Decision| matches!(decision.why, Why::Probe | Why::Measure);
        let tried = match self.said {
            0 => tried(decisions.iter().filter(is_try).collect(), unit),
            _ => None,
        };
        let tried = tried.map_or_else(String::new, |tried| format!("; {tried}"));
        let failed = decisions.iter().filter(|decision| decision.failed);
        let mut lines: Vec<_> =
            failed.map(|decision| format!("  memory ran out: {decision}")).collect();
        let (size, why) = match (decisions.iter().rfind(|one| !is_try(one)), decisions.last()) {
            (Some(Decision { size, why, .. }), _) => (*size, why.to_string()),
            (None, Some(Decision { size, .. })) if self.said == 0 => {
                (*size, "for now, too few steps to compare them all".to_owned())
            }
            _ => return lines,
        };
        if mem::replace(&mut self.said, size) != size {
            lines.push(format!("  took micro-batches of {size} {unit}: {why}{tried}"));
        }
        lines
    }
}

/// Reports an epoch, or a test within an epoch.
pub(super) fn tell(told: &(impl Serialize + fmt::Display), trainer: &Trainer) -> Result<()> {
    match (trainer.is_first(), trainer.options.json) {
        (false, _) => Ok(()),
        (true, true) => {
            let done = trainer.is_over();
            output::line(&serde_json::to_string(&JsonLine { told, done })?)
        }
        (true, false) => output::prose(&told.to_string()),
    }
}

/// Lists the sizes that were probed, and the memory that the largest fitting size needed.
fn tried(mut decisions: Vec<&Decision>, unit: &str) -> Option<String> {
    decisions.sort_by_key(|decision| decision.size);
    decisions.dedup_by_key(|decision| decision.size);
    let sizes: Vec<String> = decisions.iter().map(|decision| decision.size.to_string()).collect();
    let fitted =
        |decision: &&Decision| Some((decision.size, decision.measured?, decision.available));
    let (size, needed, available) = decisions.iter().rev().find_map(fitted)?;
    Some(format!(
        "tried {}: {size} {unit} needed {needed} of {available} free memory",
        sizes.join(", ")
    ))
}

fn introduce(trainer: &Trainer) -> Result<String> {
    let variables = trainer.engine.variables()?;
    let dataset = &trainer.dataset;
    let introduction = format!(
        "{}, {}, {}\n{} samples to train on, {} to test on, {}",
        trainer.options.model,
        parameters(&variables),
        trainer.engine.place(),
        dataset.train.len(),
        dataset.test.len(),
        dataset.description
    );
    Ok([introduction]
        .into_iter()
        .chain(trainer.usual.lines(trainer))
        .collect::<Vec<_>>()
        .join("\n"))
}

/// Counts the parameters, and with LoRA how many of them are trained.
fn parameters(variables: &Named) -> String {
    let count = |which: fn(&Tensor) -> bool| -> usize {
        let of_these = variables.iter().filter(|(_, variable)| which(variable));
        of_these.map(|(_, variable)| variable.numel()).sum()
    };
    let (trained, frozen) = (count(Tensor::requires_grad), count(|one| !one.requires_grad()));
    match variables.iter().any(|(name, _)| Lora::is_adapter(name)) {
        true => format!("{trained} of {} parameters trained", trained + frozen),
        // Without LoRA, the only variables that are not trained are running statistics.
        false => format!("{trained} parameters"),
    }
}

impl fmt::Display for TestFigures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, loss, accuracy, best, .. } = self;
        let accuracy = accuracy * 100.0;
        let best = if *best { "  best so far" } else { "" };
        write!(f, "  step {step}  test {loss:.4}  acc {accuracy:5.1} %{best}")
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { epoch, loss, test_loss, test_accuracy, peak_bytes, samples_per_s, .. } = self;
        let peak: &Bytes = peak_bytes;
        write!(
            f,
            // At most 80 columns wide, so that an epoch fits on one line of a narrow terminal.
            "epoch {epoch:>3}  loss {loss:.4}  test {test_loss:.4}  acc {:5.1} %  \
             {samples_per_s:5.0} samples/s  {peak}",
            test_accuracy * 100.0
        )
    }
}

/// Says where the run stopped, and gives the command that resumes it.
pub(super) fn story(trainer: &Trainer) -> String {
    let (epochs, steps) = (trainer.state.epoch, trainer.state.running.steps);
    let stopped = match steps {
        0 => format!("interrupted after epoch {epochs}"),
        _ => {
            format!("interrupted after step {steps} of {} in epoch {}", trainer.steps(), epochs + 1)
        }
    };
    let Some(place) = trainer.options.files.save.as_deref() else {
        return format!("{stopped}; nothing was saved: give --save FILE to resume");
    };
    let shown = place.display();
    if trainer.is_over() {
        return format!("{stopped} and saved to {shown}; the training is complete");
    }
    let program = env::args().next().unwrap_or_else(|| "brimful".to_owned());
    let command = command(&program, trainer.world.size(), place);
    format!("{stopped} and saved to {shown}; resume with\n  {command}")
}

/// Returns the command that resumes a saved run over `ranks` ranks. The command needs no other flags, because the
/// saved run stores them.
fn command(program: &str, ranks: usize, place: &Path) -> String {
    let launcher = if ranks > 1 { format!("mpirun -n {ranks} ") } else { String::new() };
    let place = quoted(&place.to_string_lossy());
    format!("{launcher}{} train --resume {place}", quoted(program))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_goes_on_from_the_saved_place() {
        let place = Path::new("b c");
        assert_eq!(command("brimful", 1, place), "brimful train --resume 'b c'");
        assert_eq!(command("brimful", 4, place), "mpirun -n 4 brimful train --resume 'b c'");
    }
}
