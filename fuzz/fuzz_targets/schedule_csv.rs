//! A schedule from a file: refused with an error, or sound enough to be simulated, drawn and written back.

#![no_main]

use brimful_plan::schedule::{Actions, Costs, render, simulate};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let Ok(actions) = text.parse::<Actions>() else { return };
    let costs = Costs::ticks(actions.stages());
    let simulation = simulate(&actions, &costs).expect("ticks are sound costs");
    let done: usize = simulation.timeline().iter().map(Vec::len).sum();
    assert_eq!(done, actions.lists().iter().map(Vec::len).sum::<usize>(), "nothing is left undone");
    let _ = render::grid(&actions).width(80).to_string();
    let _ = render::trace(&actions, &costs, &simulation);
    assert_eq!(actions.to_string().parse::<Actions>(), Ok(actions));
});
