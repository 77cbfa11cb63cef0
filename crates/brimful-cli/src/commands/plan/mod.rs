//! `brimful plan`: predicts the time, bubble and memory of a step before anything runs.

mod answers;
mod capacity;
mod host;
mod measure;
mod options;
mod report;
mod stage_table;
mod table;

use anyhow::{Result, ensure};
use brimful::schedule::ActionKind;
use brimful::schedule::render::{self, Panel};
use brimful_plan::plan::PlannedStep;

use super::report::write_page;
use crate::exit::Exit;
use crate::output;
use answers::{Answers, PlanAnswer};

pub(crate) use options::PlanOptions;

/// A grid with more lines than this is left out; the picture and the trace show everything.
const LINES: usize = 16;
/// Width of a grid that is not for a terminal.
const COLUMNS: usize = 120;
/// A picture with more actions than this would be unreadable.
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
        write_page(path, &report::of(options, &shown, in_seconds))?;
    }
    if options.json {
        let mut json = serde_json::json!({ "rows": lines });
        if let Some(capacity) = &capacity {
            json["offload"] = serde_json::to_value(capacity)?;
        }
        output::line(&json.to_string())?;
    } else {
        let table = table::table(&shown, in_seconds);
        let stages = stage_table::table(&shown[0].line.stages);
        let capacity = capacity.map_or(String::new(), |capacity| capacity.text());
        output::prose(&[table, left_out(&refused), stages, capacity].concat())?;
        output::line(&grid(&shown[0])?)?;
    }
    let fits = lines.iter().any(|line| line.fits);
    Ok(if fits { Exit::Done } else { Exit::DoesNotFit })
}

/// Formats the reasons of schedules that were left out. One is enough: most share it.
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
    // Checked before rendering: a grid has a cell for each tick of each device, and many devices would fill the
    // memory.
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
