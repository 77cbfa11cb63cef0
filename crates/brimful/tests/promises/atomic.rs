//! Atomic: a call with any failure leaves values, gradients, statistics and random state unchanged to the last
//! bit, and the next call is unaffected.

use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;

use brimful::world::WorldError;
use brimful::{Error, MicroBatches, Result, World};
use tch::Tensor;

use crate::kinds::{Drawing, Engine, LossFn, Make, Samples, Target};
use crate::plain::{MOVED, OF_ALL, SEVERAL, engine, reset, samples, seed, state};
use crate::support::{Named, assert_same};

const SIZE: MicroBatches = MicroBatches::Samples(3);
/// Stride between failing allocations over ranks, where each run takes longer.
const STRIDE_OVER_RANKS: u64 = 19;

fn first() -> Samples {
    samples(10, 10)
}

fn second() -> Samples {
    samples(7, 20)
}

/// Returns an engine in the state that every call starts from.
fn started(make: Make, world: &World) -> Box<dyn Engine> {
    let mut engine = engine(make, MOVED, SIZE, world);
    restart(&mut *engine);
    engine
}

/// Restores the initial values, and the gradients and statistics of an earlier step.
fn restart(engine: &mut dyn Engine) {
    reset(engine, MOVED);
    engine.backward(&second(), &SEVERAL.loss()).expect("an earlier step");
    seed(engine);
}

/// Call that may fail at any time.
struct Call {
    name: &'static str,
    /// Preparation that runs once.
    before: fn(&mut dyn Engine) -> Result<()>,
    /// Preparation of every attempt, which is lost with it.
    each: fn(&mut dyn Engine) -> Result<()>,
    run: fn(&mut dyn Engine) -> Result<()>,
    /// Work after the first success.
    after: fn(&mut dyn Engine) -> Result<()>,
    applies: fn(&dyn Engine) -> bool,
    /// Stride between failing allocations.
    stride: u64,
}

const BACKWARD: Call = Call {
    name: "backward",
    before: |_| Ok(()),
    each: |_| Ok(()),
    run: |engine| engine.backward(&first(), &SEVERAL.loss()).map(drop),
    after: |_| Ok(()),
    applies: |_| true,
    stride: 1,
};

const CALLS: [Call; 5] = [
    BACKWARD,
    Call {
        name: "backward_whole",
        run: |engine| engine.backward_whole(&first(), OF_ALL).map(drop),
        applies: |engine| engine.about().has_whole,
        stride: 7,
        ..BACKWARD
    },
    Call {
        name: "evaluate",
        run: |engine| engine.evaluate(&first(), &SEVERAL.loss()).map(drop),
        stride: 7,
        ..BACKWARD
    },
    Call {
        name: "accumulate",
        before: |engine| engine.accumulate(&first(), &SEVERAL.loss()),
        run: |engine| engine.accumulate(&second(), &SEVERAL.loss()),
        after: |engine| engine.commit().map(drop),
        // Ranks that accumulate on their own also fail on their own; one process covers that.
        applies: |engine| !engine.about().accumulates_apart,
        stride: 7,
        ..BACKWARD
    },
    Call {
        name: "commit",
        each: |engine| {
            seed(engine);
            engine.accumulate(&first(), &SEVERAL.loss())?;
            engine.accumulate(&second(), &SEVERAL.loss())
        },
        run: |engine| engine.commit().map(drop),
        stride: 5,
        ..BACKWARD
    },
];

pub fn holds_for_memory(make: Make, world: &World) {
    let one = engine(make, MOVED, SIZE, world);
    let memories = one.about().arenas.len();
    for call in CALLS.iter().filter(|call| (call.applies)(&*one)) {
        let expected = undisturbed(make, world, call);
        for rank in 0..world.size() {
            for memory in 0..memories {
                every_allocation(make, world, call, (rank, memory), &expected);
            }
        }
    }
}

/// Returns the state after the undisturbed call.
fn undisturbed(make: Make, world: &World, call: &Call) -> Named {
    let mut engine = started(make, world);
    for part in [call.before, call.each, call.run, call.after] {
        part(&mut *engine).expect(call.name);
    }
    state(&*engine)
}

/// Fails the first allocation in one memory of one rank, then the second, until all succeed.
fn every_allocation(
    make: Make,
    world: &World,
    call: &Call,
    (rank, memory): (usize, usize),
    expected: &Named,
) {
    let mut engine = started(make, world);
    (call.before)(&mut *engine).expect(call.name);
    let arena = engine.about().arenas[memory].clone();
    let stride = if world.size() > 1 { STRIDE_OVER_RANKS } else { call.stride };
    let before = state(&*engine);
    // Parts run the same code: each fails at its share of the allocations.
    let (parts, memories) = (engine.about().own.len(), engine.about().arenas.len());
    let first = 1 + (memory * parts / memories) as u64;
    let mut failures = 0;
    for n in (first..).step_by(stride as usize * parts) {
        let name = engine.about().name;
        let what = format!("{name}, {}, allocation {n} of memory {memory}, rank {rank}", call.name);
        (call.each)(&mut *engine).expect(call.name);
        if rank == world.rank() {
            arena.fail_nth_allocation(n);
        }
        let ended = (call.run)(&mut *engine);
        arena.fail_nth_allocation(0);
        let Err(error) = ended else { break };
        let oom = error.out_of_memory().unwrap_or_else(|| panic!("{what}: {error}"));
        assert_eq!(oom.arena(), Some(format!("memory {memory}").as_str()), "{what}");
        assert_same(&what, &before, &state(&*engine));
        failures += 1;
    }
    let what = format!("{}, {}, after {failures} failures", engine.about().name, call.name);
    // Some memories have nothing to do in a commit.
    assert!(failures > 0 || call.name == "commit", "{what}");
    (call.after)(&mut *engine).expect(&what);
    assert_same(&what, expected, &state(&*engine));
}

const GIVES_UP: &str = "the closure gives up";

/// Fault of a closure, in the micro-batch with a given sample.
#[derive(Debug, Clone, Copy)]
enum Fault {
    Error,
    Panic,
    NotFinite,
}

fn faulty(fault: Fault, sample: i64) -> LossFn {
    Arc::new(move |out: &Tensor, target: &Target| {
        let loss = (SEVERAL.micro)(out, target);
        let hit = target.2.eq(sample).any().int64_value(&[]) != 0;
        match (hit, fault) {
            (false, _) => Ok(loss),
            (true, Fault::Error) => Err(GIVES_UP.to_owned()),
            (true, Fault::Panic) => panic::panic_any(GIVES_UP),
            (true, Fault::NotFinite) => Ok((SEVERAL.micro)(&(out * f64::NAN), target)),
        }
    })
}

pub fn holds_for_closures(make: Make, world: &World) {
    let expected = undisturbed(make, world, &BACKWARD);
    let mut engine = engine(make, MOVED, SIZE, world);
    for fault in [Fault::Error, Fault::Panic, Fault::NotFinite] {
        // In each micro-batch of two parts.
        for sample in [0, 4, 5, 9] {
            let what = format!("{}, {fault:?} at sample {sample}", engine.about().name);
            restart(&mut *engine);
            let before = state(&*engine);
            let ended = ended(|| engine.backward(&first(), &faulty(fault, sample)).map(drop));
            let words = if matches!(fault, Fault::NotFinite) { "NaN" } else { GIVES_UP };
            assert!(ended.words.contains(words), "{what}: {}", ended.words);
            if !matches!(fault, Fault::NotFinite) {
                blames_one(&*engine, world, fault, &ended, &what);
            }
            assert_same(&what, &before, &state(&*engine));
            engine.backward(&first(), &SEVERAL.loss()).expect(&what);
            assert_same(&what, &expected, &state(&*engine));
        }
    }
    // A mini-batch that fails within a window has no effect.
    let expected = undisturbed(make, world, &CALLS[3]);
    for fault in [Fault::Error, Fault::Panic] {
        let what = format!("{}, {fault:?} in a window", engine.about().name);
        restart(&mut *engine);
        engine.accumulate(&first(), &SEVERAL.loss()).expect(&what);
        let before = state(&*engine);
        let batch = second();
        // The last sample is the last rank's.
        let fails = !engine.about().accumulates_apart || world.rank() + 1 == world.size();
        let loss = faulty(fault, 6);
        if !fails {
            engine.accumulate(&batch, &loss).expect(&what);
        } else {
            let ended = ended(|| engine.accumulate(&batch, &loss));
            assert!(ended.words.contains(GIVES_UP), "{what}: {}", ended.words);
            assert_same(&what, &before, &state(&*engine));
            engine.accumulate(&batch, &SEVERAL.loss()).expect(&what);
        }
        engine.commit().expect(&what);
        assert_same(&what, &expected, &state(&*engine));
    }
}

/// End of a call that fails.
struct Ended {
    words: String,
    panicked: bool,
    /// Another rank that it blames.
    blamed: Option<usize>,
}

/// Returns the end of a call that must fail, by an error or by a panic.
fn ended(call: impl FnOnce() -> Result<()>) -> Ended {
    match panic::catch_unwind(AssertUnwindSafe(call)) {
        Ok(ended) => {
            let error = ended.expect_err("it fails");
            let blamed = match &error {
                Error::World(WorldError::RankFailed { rank, .. }) => Some(*rank),
                _ => None,
            };
            Ended { words: error.to_string(), panicked: false, blamed }
        }
        // The closure's own payload.
        Err(payload) => {
            let words = payload.downcast_ref::<&str>().expect("a closure's words");
            Ended { words: (*words).to_owned(), panicked: true, blamed: None }
        }
    }
}

/// Checks that the rank whose closure failed has its own failure, and that the others blame that rank.
fn blames_one(engine: &dyn Engine, world: &World, fault: Fault, ended: &Ended, what: &str) {
    let all = world.share("who is blamed", &ended.blamed).expect("shared");
    let failed: Vec<usize> = (0..all.len()).filter(|rank| all[*rank].is_none()).collect();
    assert_eq!(failed.len(), 1, "{what}: {all:?}");
    assert!(all.iter().flatten().all(|rank| *rank == failed[0]), "{what}: {all:?}");
    match ended.blamed {
        Some(rank) => assert!(ended.words.contains(&format!("rank {rank}")), "{}", ended.words),
        None => {
            // A pipeline's workers catch it, and say where it was.
            let goes_on =
                matches!(fault, Fault::Panic) && engine.about().drawing != Drawing::ByLayer;
            assert_eq!(ended.panicked, goes_on, "{what}");
            assert!(!goes_on || ended.words == GIVES_UP, "{what}: {}", ended.words);
        }
    }
}
