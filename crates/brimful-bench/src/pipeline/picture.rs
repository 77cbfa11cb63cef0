//! Picture of the schedules, simulated and measured, side by side.

use brimful::schedule::Simulation;
use brimful::schedule::render::{Panel, svg};

use super::runner::Runner;

/// Draws each schedule as simulated from its layers' times, and under it as measured, in seconds.
pub(super) fn draw(runners: &[Runner]) -> String {
    let titles = runners.iter().map(|runner| {
        let name = runner.row.choice.schedule;
        [format!("{name}, simulated"), format!("{name}, measured")]
    });
    let titles: Vec<_> = titles.collect();
    let measured: Vec<_> = runners.iter().filter_map(measured).collect();
    let panels = (runners.iter().zip(&measured).zip(&titles)).flat_map(
        |((runner, measured), [promised_title, measured_title])| {
            let actions = &runner.planned.actions;
            [
                Panel { title: promised_title, actions, simulation: &runner.planned.simulation },
                Panel { title: measured_title, actions, simulation: measured },
            ]
        },
    );
    svg(&panels.collect::<Vec<_>>())
}

fn measured(runner: &Runner) -> Option<Simulation> {
    let step = runner.typical()?;
    let timeline = step.timeline.as_ref()?;
    Some(Simulation::measured(&timeline.actions, &timeline.spans, &[], &runner.peaks))
}
