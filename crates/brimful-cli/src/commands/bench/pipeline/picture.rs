//! The schedules side by side, simulated and measured.

use brimful::schedule::Simulation;
use brimful::schedule::render::{Panel, svg};

use super::runner::Runner;

/// For each schedule what its layers' times promise, and under it what was measured, in seconds.
pub(super) fn draw(runners: &[Runner]) -> String {
    let measured: Vec<_> = runners.iter().filter_map(measured).collect();
    let titles: Vec<_> =
        runners.iter().map(|runner| runner.row.choice.schedule.to_string()).collect();
    let titles: Vec<_> = titles
        .iter()
        .map(|name| [format!("{name}, simulated"), format!("{name}, measured")])
        .collect();
    let panels: Vec<_> = (runners.iter().zip(&measured).zip(&titles))
        .flat_map(|((runner, measured), [simulated_title, measured_title])| {
            let actions = &runner.planned.actions;
            [
                Panel { title: simulated_title, actions, simulation: &runner.planned.simulation },
                Panel { title: measured_title, actions, simulation: measured },
            ]
        })
        .collect();
    svg(&panels)
}

fn measured(runner: &Runner) -> Option<Simulation> {
    let step = runner.last.as_ref()?;
    Some(Simulation::measured(&step.actions, &step.timeline, &runner.peaks))
}
