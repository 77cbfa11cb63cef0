//! Schedules and recompute modes as they are given on the command line.

use brimful::schedule::{Recompute, Schedule};

use crate::nearest::did_you_mean;

/// Reads a schedule; a slip is told the name that was meant.
pub fn schedule(text: &str) -> Result<Schedule, String> {
    let names = Schedule::all(2).map(|schedule| schedule.to_string());
    text.parse()
        .map_err(|error| format!("{error}{}", did_you_mean(text, names.iter().map(String::as_str))))
}

/// Reads when activations are computed again.
pub fn recompute(text: &str) -> Result<Recompute, String> {
    let names = Recompute::ALL.map(Recompute::name);
    text.parse().map_err(|error| format!("{error}{}", did_you_mean(text, names)))
}
