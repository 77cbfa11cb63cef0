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
use kinds::Make;

/// Checks a guarantee for these kinds in one process.
fn here(makes: &[Make], holds: fn(Make, &World)) {
    makes.iter().for_each(|make| holds(*make, &World::alone()));
}

/// Checks a guarantee for these kinds over ranks.
#[cfg(feature = "mpi")]
fn over_ranks(makes: &[Make], holds: fn(Make, &World)) {
    support::ranks::in_ranks(2, |world| makes.iter().for_each(|make| holds(*make, &world)));
}

/// Generates a test for one process, and one over ranks.
macro_rules! promises {
    ($($name:ident: $holds:path,)*) => {
        mod in_one_process {
            $(#[test]
            fn $name() {
                crate::here(crate::kinds::HERE, $holds);
            })*

            #[test]
            fn transparent_in_every_schedule() {
                crate::here(crate::kinds::NAMED, crate::transparent::holds_in_its_order);
            }
        }

        #[cfg(feature = "mpi")]
        mod in_ranks {
            $(#[test]
            fn $name() {
                crate::over_ranks(crate::kinds::OVER_RANKS, $holds);
            })*

            #[test]
            fn transparent_in_a_schedule_of_several_stages_per_rank() {
                crate::over_ranks(crate::kinds::NAMED_OVER_RANKS, crate::transparent::holds_in_its_order);
            }
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
