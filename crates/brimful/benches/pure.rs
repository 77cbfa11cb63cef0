//! Times of the modules without libtorch, and their growth with the size.
//!
//! `cargo bench -p brimful --bench pure` (`-- simulate`: those alone)

#![allow(clippy::print_stdout)] // Printing is what this program is for.
#![allow(clippy::unwrap_used)]

mod timing;

use std::hint::black_box;

use brimful::balance::{self, LayerCost, Profile};
use brimful::plan::{PlanDevice, Request, plan};
use brimful::schedule::{Costs, Recompute, Schedule, simulate};
use brimful_plan::balance::{Load, Slot, by_time_within};
use timing::report;

fn main() {
    timing::heading();
    balancing();
    simulating();
    planning();
}

/// Times that repeat only after a long while, without a random number.
fn time(layer: usize) -> f64 {
    1.0 + (layer * 7919 % 1009) as f64 / 1009.0
}

fn loads(layers: usize) -> Vec<Load> {
    let load = |k| Load {
        time: time(k),
        bytes: 1 << 20,
        activation_bytes: 1 << 16,
        output_bytes: 1 << (k % 7),
    };
    (0..layers).map(load).collect()
}

fn balancing() {
    for (layers, devices) in [(100, 8), (1_000, 64), (10_000, 1_024)] {
        let loads = loads(layers);
        let like = vec![Slot::default(); devices];
        let unlike: Vec<_> = (0..devices).map(|d| unlike(d, layers / devices)).collect();
        let size = format!("{layers}x{devices}");
        report(&format!("balance/by_time/{size}"), 1, || {
            balance::by_time(black_box(&loads), &like).unwrap()
        });
        report(&format!("balance/by_time_within_unlike/{size}"), 1, || {
            by_time_within(black_box(&loads), &unlike).unwrap()
        });
    }
}

/// Devices of three speeds, with room for thrice their share.
fn unlike(device: usize, share: usize) -> Slot {
    let memory = Some((3 * share as u64) << 20);
    Slot { speed: [1.0, 1.5, 0.8][device % 3], memory, held: 4 }
}

fn simulating() {
    for (stages, micro_batches) in [(8, 32), (64, 256), (256, 1_024), (1_024, 4_096)] {
        for schedule in [Schedule::OneFOneB, Schedule::ZeroBubbleH1] {
            report(&format!("simulate/{schedule}/{stages}x{micro_batches}"), 1, || {
                let actions = schedule.actions(stages, micro_batches, Recompute::Never).unwrap();
                simulate(&actions, &Costs::ticks(stages)).unwrap().makespan()
            });
        }
    }
}

fn planning() {
    for layers in [25, 50, 100, 200] {
        let profile = Profile { input_bytes: 1 << 10, layers: (0..layers).map(layer).collect() };
        for (name, memory) in [("free", None), ("tight", Some((8 * layers as u64) << 20))] {
            let request = Request::new(&profile, vec![PlanDevice { speed: 1.0, memory }; 8], 64);
            report(&format!("plan/{name}/{layers}x8"), 1, || plan(black_box(&request)).unwrap());
        }
    }
}

fn layer(k: usize) -> LayerCost {
    LayerCost {
        forward: time(k),
        backward: 2.0 * time(k),
        parameter_bytes: 8 << 20,
        activation_bytes: 1 << 20,
        output_bytes: 1 << 16,
        ..LayerCost::default()
    }
}
