//! Draws a model, an engine and a script, runs the script on the engine and on the plain model with the whole
//! batch, and compares losses, outputs, gradients, parameters, running statistics and random state after every
//! operation.
//!
//! | variable | meaning |
//! | --- | --- |
//! | `BRIMFUL_FUZZ_CASES` | number of cases (300) |
//! | `BRIMFUL_FUZZ_SEED` | seed of the first case (0) |
//! | `BRIMFUL_TEST_DEVICE` | the device, such as `cuda:0` |
//! | `BRIMFUL_TEST_CUDA_GRAPHS` | with CUDA graphs |
//!
//! A failing case is shrunk and printed as its seed and as code, which [`regressions`] keeps.

mod engines;
mod model;
mod plain;
#[cfg(feature = "mpi")]
mod ranks;
mod regressions;
mod script;
#[path = "../suite/support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::env;
use std::panic::{self, AssertUnwindSafe};

use brimful::World;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use script::{Case, Counts};
use support::words_of;

/// Maximum number of simpler forms of a failing case to run.
const SHRINKS: usize = 400;

/// Returns the case of a seed, with its simpler forms.
fn tree(seed: u64) -> impl ValueTree<Value = Case> {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    script::case().new_tree(&mut runner).expect("a case")
}

fn number(name: &str, default: u64) -> u64 {
    match env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name} is a number, not '{text}'")),
        Err(_) => default,
    }
}

/// Returns the failure of a case, if any.
fn failure(case: &Case, world: &World, counts: &mut Counts) -> Option<String> {
    let case = case.clone().settled(world);
    let run = panic::catch_unwind(AssertUnwindSafe(|| script::run(&case, world, counts)));
    let payload = run.err()?;
    Some(words_of(&*payload).unwrap_or_else(|| "a panic without words".into()))
}

/// Step on the way to a simpler form of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    Simplify,
    Complicate,
}

impl Turn {
    fn take(self, tree: &mut impl ValueTree<Value = Case>) -> bool {
        match self {
            Self::Simplify => tree.simplify(),
            Self::Complicate => tree.complicate(),
        }
    }
}

/// Returns the smallest form of a seed's case that still fails, and its failure. `fails` receives a form and the
/// way to it.
fn shrunk(
    seed: u64,
    first: String,
    shrinks: usize,
    mut fails: impl FnMut(&Case, &[Turn]) -> Option<String>,
) -> (Case, String) {
    let mut tree = tree(seed);
    let (mut case, mut message) = (tree.current(), first);
    let mut way = vec![Turn::Simplify];
    for _ in 0..shrinks {
        if !way[way.len() - 1].take(&mut tree) {
            break;
        }
        let smaller = tree.current();
        way.push(match fails(&smaller, &way) {
            Some(text) => {
                (case, message) = (smaller, text);
                Turn::Simplify
            }
            None => Turn::Complicate,
        });
    }
    (case, message)
}

/// Prints the case as the code that creates it.
fn code(case: &Case) -> String {
    format!("{case:?}").replace('[', "vec![")
}

fn check_seed(seed: u64, world: &World, counts: &mut Counts) -> Result<(), String> {
    match failure(&tree(seed).current(), world, counts) {
        None => Ok(()),
        Some(message) => {
            let fails = |case: &Case, _: &[Turn]| failure(case, world, &mut Counts::default());
            let (case, message) = shrunk(seed, message, SHRINKS, fails);
            Err(format!("seed {seed}: {message}\n{}", code(&case)))
        }
    }
}

/// Suppresses the messages of expected panics.
fn quietly<T>(f: impl FnOnce() -> T) -> T {
    let before = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    let value = panic::catch_unwind(AssertUnwindSafe(f));
    panic::set_hook(before);
    value.unwrap_or_else(|payload| panic::resume_unwind(payload))
}

#[allow(clippy::print_stdout, reason = "what was drawn is there to be read")]
fn report(counts: &Counts, engines: &BTreeMap<String, usize>) {
    let sum = |counts: &BTreeMap<String, usize>| counts.values().sum::<usize>();
    let (done, refused, failed) = (sum(&counts.done), sum(&counts.refused), sum(&counts.failed));
    println!("engines: {engines:?}");
    println!("operations: {done} done, {failed} failed as drawn, {refused} refused");
    for (title, counts) in
        [("done", &counts.done), ("failed", &counts.failed), ("refused", &counts.refused)]
    {
        println!("{title}:");
        counts.iter().for_each(|(name, count)| println!("  {count:6} {name}"));
    }
}

#[test]
fn engines_are_the_plain_model() {
    let world = World::alone();
    let mut counts = Counts::default();
    let mut engines = BTreeMap::new();
    let first = number("BRIMFUL_FUZZ_SEED", 0);
    let checked = quietly(|| {
        for (name, case) in regressions::cases() {
            if let Some(message) = failure(&case, &world, &mut counts) {
                return Err(format!("the regression '{name}': {message}"));
            }
        }
        for seed in first..first + number("BRIMFUL_FUZZ_CASES", 300) {
            let name = format!("{:?}", tree(seed).current().engine);
            let name = name.split(' ').next().unwrap_or(&name).to_owned();
            Counts::add(&mut engines, name);
            check_seed(seed, &world, &mut counts)?;
        }
        Ok(())
    });
    report(&counts, &engines);
    checked.unwrap_or_else(|failed| panic!("{failed}"));
}
