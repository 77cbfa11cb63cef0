//! What this library promises, for every kind of engine: one suite, which a new kind runs through by
//! implementing [`kinds::Engine`] and a line in [`kinds::HERE`] or [`kinds::OVER_RANKS`].

mod alike;
mod atomic;
mod bounded;
mod ends;
mod kinds;
mod plain;
#[path = "../support/mod.rs"]
mod support;
mod told;
mod transparent;

use brimful::World;
use kinds::{HERE, Make};

/// Checks a promise for all kinds that need one process.
fn here(holds: fn(Make, &World)) {
    let _turn = support::alone();
    HERE.iter().for_each(|make| holds(*make, &World::alone()));
}

/// The same for those that are spread over ranks.
#[cfg(feature = "mpi")]
fn over_ranks(holds: fn(Make, &World)) {
    support::ranks::in_ranks(2, |world| {
        kinds::OVER_RANKS.iter().for_each(|make| holds(*make, &world));
    });
}

/// A test for one process and one over ranks.
macro_rules! promise {
    ($here:ident, $over_ranks:ident, $holds:path) => {
        #[test]
        fn $here() {
            here($holds);
        }

        #[cfg(feature = "mpi")]
        #[test]
        fn $over_ranks() {
            over_ranks($holds);
        }
    };
}

promise!(transparent, transparent_over_ranks, transparent::holds);
promise!(atomic_without_memory, atomic_without_memory_over_ranks, atomic::holds_for_memory);
promise!(atomic_after_closures, atomic_after_closures_over_ranks, atomic::holds_for_closures);
promise!(bounded, bounded_over_ranks, bounded::holds);
promise!(ends, ends_over_ranks, ends::holds);
promise!(told, told_over_ranks, told::holds);

promise!(
    memory_is_kept_for_an_optimizer,
    memory_is_kept_for_an_optimizer_over_ranks,
    alike::memory_is_kept_for_an_optimizer
);
promise!(
    memory_stays_reserved_after_a_failure,
    memory_stays_reserved_after_a_failure_over_ranks,
    alike::memory_stays_reserved_after_a_failure
);
promise!(sizes_are_remembered, sizes_are_remembered_over_ranks, alike::sizes_are_remembered);
promise!(
    what_cannot_fit_is_refused,
    what_cannot_fit_is_refused_over_ranks,
    alike::what_cannot_fit_is_refused
);
promise!(
    few_samples_for_batch_norm_are_warned_of,
    few_samples_for_batch_norm_are_warned_of_over_ranks,
    alike::few_samples_for_batch_norm_are_warned_of
);
promise!(
    hidden_out_of_memory_is_warned_of,
    hidden_out_of_memory_is_warned_of_over_ranks,
    alike::hidden_out_of_memory_is_warned_of
);
promise!(
    losses_of_all_outputs_have_terms,
    losses_of_all_outputs_have_terms_over_ranks,
    alike::losses_of_all_outputs_have_terms
);
promise!(
    what_counts_once_counts_once,
    what_counts_once_counts_once_over_ranks,
    alike::what_counts_once_counts_once
);
