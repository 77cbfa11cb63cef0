//! `brimful plan`: predicts the time, bubble and memory of a step before anything runs.

mod answers;
mod capacity;
mod measure;
mod options;
mod table;

use anyhow::{Result, ensure};
use brimful::schedule::render::{self, Panel};
use brimful::schedule::{ActionKind, Recompute};
use brimful_plan::plan::PlannedStep;
use brimful_report::{Compared, Device, Run, TimelineRecord, Unit};

use super::report::write_page;
use crate::exit::Exit;
use crate::{calendar, output, shell};
use answers::{Answers, PlanAnswer, PlanLine};
pub(crate) use options::PlanOptions;

/// Limit on the lines of a grid. A larger grid is not printed; the picture and the trace show everything.
const LINES: usize = 16;
/// Width of a grid that is not for a terminal.
const COLUMNS: usize = 120;
/// Limit on the actions in a picture, because a picture with more actions would be unreadable.
const DRAWN: usize = 100_000;

/// Prints the plans, and writes the requested files.
pub(crate) fn run(options: &PlanOptions) -> Result<Exit> {
    let Answers { lines, shown, refused, in_seconds, capacity } = answers::find(options)?;
    if let Some(path) = &options.svg {
        output::file(path, &picture(&shown)?)?;
    }
    if let Some(path) = &options.trace {
        let PlannedStep { actions, costs, simulation, .. } = &shown[0].step;
        output::file(path, &render::trace(actions, costs, simulation))?;
    }
    if let Some(path) = &options.report {
        write_page(path, &run_of(options, &shown, in_seconds))?;
    }
    if options.json {
        let mut json = serde_json::json!({ "rows": lines });
        if let Some(capacity) = &capacity {
            json["offload"] = serde_json::to_value(capacity)?;
        }
        output::line(&json.to_string())?;
    } else {
        let table = table::compare(&shown, in_seconds);
        let stages = table::describe(&shown[0].line.stages);
        let capacity = capacity.map_or(String::new(), |capacity| capacity.text());
        output::prose(&[table, left_out(&refused), stages, capacity].concat())?;
        output::line(&grid(&shown[0])?)?;
    }
    let fits = lines.iter().any(|line| line.fits);
    Ok(if fits { Exit::Done } else { Exit::DoesNotFit })
}

/// Formats the reasons why schedules were left out. Shows only the first reason, because most schedules share it.
fn left_out(refused: &[String]) -> String {
    match refused {
        [] => String::new(),
        [only] => format!("\nLeft out: {only}\n"),
        [first, rest @ ..] => format!("\nLeft out: {first} (and {} more)\n", rest.len()),
    }
}

fn grid(best: &PlanAnswer) -> Result<String> {
    let PlannedStep { actions, transfers, .. } = &best.step;
    let columns = output::columns().unwrap_or(COLUMNS);
    // The check comes before rendering. A grid has a cell for each tick of each device, so the grid of many
    // devices would fill the memory.
    let is_small = actions.lists().iter().map(Vec::len).sum::<usize>() < LINES * columns;
    let grid = || {
        let grid = match transfers.is_empty() {
            true => render::grid(actions),
            false => render::grid_with_transfers(actions, transfers)?,
        };
        Ok::<_, anyhow::Error>(grid.width(columns).color(output::colored()).to_string())
    };
    let grid = is_small.then(grid).transpose()?;
    Ok(match grid.filter(|grid| grid.lines().count() <= LINES) {
        Some(grid) => {
            let mut all = actions.lists().iter().flatten();
            let is_whole = all.any(|action| action.kind == ActionKind::Backward);
            let two = if is_whole { ", two for a whole backward (B)" } else { "" };
            format!("\n{}, a tick for each action{two}:\n\n{grid}", best.line.schedule)
        }
        None => "\nThe grid is too large for a terminal: use --svg or --trace.\n".to_owned(),
    })
}

fn picture(shown: &[PlanAnswer]) -> Result<String> {
    let lists = shown.iter().flat_map(|answer| answer.step.actions.lists());
    let actions: usize = lists.map(Vec::len).sum();
    ensure!(
        actions <= DRAWN,
        "{actions} actions are too many for a picture: use fewer micro-batches, or --trace"
    );
    let panels: Vec<_> = shown.iter().map(PlanAnswer::panel).collect();
    Ok(render::svg(&panels))
}

impl PlanAnswer {
    fn panel(&self) -> Panel<'_> {
        let PlannedStep { actions, simulation, .. } = &self.step;
        Panel { title: &self.line.schedule, actions, simulation }
    }
}

/// Makes the record from which the report shows the steps of the table, the best first.
fn run_of(options: &PlanOptions, shown: &[PlanAnswer], in_seconds: bool) -> Run {
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
