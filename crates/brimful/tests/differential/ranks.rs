//! Differential tests over several ranks in separate processes: they draw the same cases, and each compares its
//! results with the plain model on the whole mini-batch.

use std::process;
use std::time::Duration;

use brimful::World;
use proptest::strategy::ValueTree;

use crate::script::Counts;
use crate::support::ranks::{Launcher, as_rank_or, reported, text};
use crate::{Turn, code, failure, number, quietly, shrunk, tree};

/// Longest wait of a rank; a longer one counts as a hang.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum number of simpler forms of a failing case to run; few, because starting ranks takes a second.
const SHRINKS: usize = 60;
const SENTENCE: &str = "differential: seed ";

/// Runs the cases given to the ranks: a range of seeds, or one case in a simpler form.
#[allow(clippy::print_stderr, reason = "what a rank fails with is read from there")]
fn run_as_rank(world: &World) {
    world.set_timeout(HEARTBEAT_TIMEOUT).expect("a world");
    let reported = reported();
    let mut words = reported.split(' ').map(|word| word.parse::<u64>().expect("a number"));
    let (first, count) = (words.next().expect("a seed"), words.next().expect("a count"));
    let way: Vec<u64> = words.collect();
    let mut counts = Counts::default();
    for seed in first..first + count {
        let mut tree = tree(seed);
        for turn in &way {
            let turn = if *turn == 0 { Turn::Simplify } else { Turn::Complicate };
            turn.take(&mut tree);
        }
        let failed = quietly(|| failure(&tree.current(), world, &mut counts));
        if let Some(message) = failed {
            eprintln!("{SENTENCE}{seed} rank {}: {message}", world.rank());
            // Exits instead of panicking: the other ranks wait for this one, and mpirun ends them.
            process::exit(1);
        }
    }
    if world.rank() == 0 {
        crate::report(&counts, &Default::default());
    }
}

/// Returns the output of ranks started with this word, or their failure.
fn outcome(launcher: &Launcher, ranks: usize, count: u64, word: &str) -> Result<String, String> {
    let limit = Duration::from_secs(60 + count);
    let output = launcher.start(ranks, &[], word).wait(limit);
    let text = text(&output);
    if output.status.success() { Ok(text) } else { Err(text) }
}

fn check(launcher: &Launcher, ranks: usize, first: u64, count: u64) {
    let Err(text) = outcome(launcher, ranks, count, &format!("{first} {count}")) else { return };
    let Some(failed) = text.split(SENTENCE).nth(1) else {
        panic!("{ranks} ranks from seed {first} on: {text}")
    };
    let seed: u64 = failed.split(' ').next().and_then(|seed| seed.parse().ok()).expect("a seed");
    let fails = |_: &crate::Case, way: &[Turn]| {
        let way = way.iter().map(|turn| if *turn == Turn::Simplify { " 0" } else { " 1" });
        let word = format!("{seed} 1{}", way.collect::<String>());
        let text = outcome(launcher, ranks, 1, &word).err()?;
        Some(text.split(SENTENCE).nth(1).unwrap_or(&text).to_owned())
    };
    let (case, message) = shrunk(seed, failed.to_owned(), SHRINKS, fails);
    panic!("{ranks} ranks, seed {seed}: {message}\n{}", code(&case));
}

#[test]
fn ranks_are_the_plain_model() {
    as_rank_or(
        |world| run_as_rank(&world),
        |launcher| {
            let first = number("BRIMFUL_FUZZ_SEED", 0);
            let count = number("BRIMFUL_FUZZ_CASES", 300).div_ceil(4);
            for ranks in [2, 3] {
                check(launcher, ranks, first, count);
            }
        },
    );
}
