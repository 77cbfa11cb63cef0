//! Guarantees of the library for every kind of engine, as one suite. A new kind joins by implementing
//! [`kinds::Engine`] and a line in [`kinds::HERE`] or [`kinds::OVER_RANKS`].

mod alike;
mod atomic;
mod bounded;
mod ends;
mod kinds;
mod plain;
#[path = "../suite/support/mod.rs"]
mod support;
mod told;
mod transparent;

use brimful::World;
use kinds::{HERE, Make};

/// Checks a guarantee for all kinds that need one process.
fn here(holds: fn(Make, &World)) {
    let _turn = support::alone();
    HERE.iter().for_each(|make| holds(*make, &World::alone()));
}

/// Checks a guarantee for the kinds that can be spread over ranks.
#[cfg(feature = "mpi")]
fn over_ranks(holds: fn(Make, &World)) {
    support::ranks::in_ranks(2, |world| {
        kinds::OVER_RANKS.iter().for_each(|make| holds(*make, &world));
    });
}

/// Generates a test for one process, and one over ranks.
macro_rules! promises {
    ($($name:ident: $holds:path,)*) => {
        mod in_one_process {
            $(#[test]
            fn $name() {
                crate::here($holds);
            })*
        }

        #[cfg(feature = "mpi")]
        mod in_ranks {
            $(#[test]
            fn $name() {
                crate::over_ranks($holds);
            })*
        }
    };
}

promises! {
    transparent: crate::transparent::holds,
    atomic_without_memory: crate::atomic::holds_for_memory,
    atomic_after_closures: crate::atomic::holds_for_closures,
    bounded: crate::bounded::holds,
    ends: crate::ends::holds,
    told: crate::told::holds,
    memory_is_kept_for_an_optimizer: crate::alike::memory_is_kept_for_an_optimizer,
    memory_stays_reserved_after_a_failure: crate::alike::memory_stays_reserved_after_a_failure,
    sizes_are_remembered: crate::alike::sizes_are_remembered,
    what_cannot_fit_is_refused: crate::alike::what_cannot_fit_is_refused,
    few_samples_for_batch_norm_are_warned_of: crate::alike::few_samples_for_batch_norm_are_warned_of,
    hidden_out_of_memory_is_warned_of: crate::alike::hidden_out_of_memory_is_warned_of,
    what_counts_once_counts_once: crate::alike::what_counts_once_counts_once,
}
