//! Conversion of simulated steps to a run without real steps, for the report page.

use brimful::schedule::Recompute;
use brimful_plan::plan::PlannedStep;
use brimful_report::{Compared, Device, Run, TimelineRecord, Unit};

use super::answers::{PlanAnswer, PlanLine};
use super::options::PlanOptions;
use crate::{calendar, shell};

/// Makes a run of the steps that the table shows, the best first.
pub(super) fn of(options: &PlanOptions, shown: &[PlanAnswer], in_seconds: bool) -> Run {
    let devices = shown.iter().map(|answer| answer.step.actions.devices()).max().unwrap_or(0);
    let mut run = Run::new(format!("a plan for {devices} devices"));
    let mut setting = |name: &str, value: Option<String>| {
        run.settings.extend(value.map(|value| (name.to_owned(), value)));
    };
    let (measured, numbers) = (&options.measured, &options.numbers);
    let schedules: Vec<String> = options.schedules().iter().map(ToString::to_string).collect();
    setting("command", Some(shell::command()));
    setting("started", Some(calendar::now()));
    setting("devices", Some(devices.to_string()));
    match &options.schedule_file {
        Some(path) => setting("schedule", Some(path.display().to_string())),
        None => setting("schedules", Some(schedules.join(", "))),
    }
    setting("micro-batches", options.num_micro_batches.map(|count| count.to_string()));
    setting("recompute", options.recompute.map(|mode| mode.to_string()));
    if !in_seconds {
        setting("forward of a device", Some(numbers.forward.to_string()));
        setting("backward of a device", Some(numbers.backward().to_string()));
        setting("activations of a device", numbers.activations.map(|bytes| bytes.to_string()));
        setting("parameters of a device", numbers.parameters.map(|bytes| bytes.to_string()));
    }
    setting("model", measured.model.as_ref().map(|model| model.to_string()));
    setting("profile", measured.profile.as_ref().map(|path| path.display().to_string()));
    setting("batch size", measured.batch_size.map(|samples| samples.to_string()));
    setting("memory limit", options.memory_limit.map(|memory| memory.to_string()));
    setting("brimful", Some(env!("CARGO_PKG_VERSION").to_owned()));
    let device = |number| Device { name: format!("device {number}"), limit: options.memory_limit };
    run.devices = (0..devices).map(device).collect();
    let unit = if in_seconds { Unit::Seconds } else { Unit::Own };
    run.timelines = shown.iter().map(|answer| compared(answer, unit)).collect();
    run
}

fn compared(answer: &PlanAnswer, unit: Unit) -> Compared {
    let PlanLine { schedule, micro_batches, recompute, fits, .. } = &answer.line;
    let recompute = match recompute {
        Some(recompute) if *recompute != Recompute::Never => format!(", recompute {recompute}"),
        _ => String::new(),
    };
    let misfit = if *fits { "" } else { ", does not fit" };
    let PlannedStep { actions, simulation, .. } = &answer.step;
    Compared {
        title: format!("{schedule}, m = {micro_batches}{recompute}{misfit}"),
        measured: None,
        simulated: Some(TimelineRecord::new(actions, simulation, unit)),
    }
}
