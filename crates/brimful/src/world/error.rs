//! Why ranks cannot go on together.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::loss::NonFiniteValue;
use crate::oom::OutOfMemory;

/// What separates the ranks of a world.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum WorldError {
    /// A program that was built without MPI, or an MPI that does not start.
    #[error("no world can be started: {reason}")]
    NotStarted {
        /// What is missing.
        reason: String,
    },
    /// A rank that is not heard of any more.
    #[error(
        "rank {rank} on {host} has not been heard of for {} s: it was killed, stopped or cut off; \
         start again from the last saved model",
        silent.as_secs()
    )]
    RankLost {
        /// Which one.
        rank: usize,
        /// The machine that it ran on.
        host: String,
        /// For how long.
        silent: Duration,
    },
    /// A rank that gives signs of life, but does not do what others wait for.
    #[error(
        "rank {rank} on {host} gives signs of life, but has been waited for for {} s: it hangs, or is \
         at something that takes longer than the longest wait that was set; start again from the last \
         saved model",
        waited.as_secs()
    )]
    RankHangs {
        /// Which one.
        rank: usize,
        /// The machine that it runs on.
        host: String,
        /// For how long.
        waited: Duration,
    },
    /// A rank that has ended while others waited for it.
    #[error("rank {rank} on {host} has ended while others needed it{}", said(words))]
    RankLeft {
        /// Which one.
        rank: usize,
        /// The machine that it ran on.
        host: String,
        /// Why, in its own words.
        words: Option<String>,
    },
    /// This rank, which the others do not hear.
    #[error("the other ranks have given up this one, rank {rank}, because they did not hear of it")]
    GivenUp {
        /// Its number.
        rank: usize,
    },
    /// A rank in which a step failed.
    #[error("rank {rank} on {host}: {message}")]
    RankFailed {
        /// Which one.
        rank: usize,
        /// The machine that it runs on.
        host: String,
        /// Its error.
        message: String,
        /// What the others know of it as that rank does.
        cause: Option<Box<RankCause>>,
    },
    /// Ranks that were not given the same.
    #[error("{what} must be the same on all ranks, but is {}", listed(found))]
    Differs {
        /// What is compared.
        what: String,
        /// What each rank has.
        found: Vec<String>,
    },
    /// Ranks that do different things.
    #[error(
        "rank {rank} calls `{theirs}` where this one calls `{here}`: let all ranks make the same calls \
         in the same order"
    )]
    OutOfStep {
        /// The other rank.
        rank: usize,
        /// What it does.
        theirs: String,
        /// What this one does.
        here: String,
    },
    /// Ranks that cannot be dealt out.
    #[error(
        "{ranks} rank{} cannot be divided into {replicas} replicas of as many ranks each: start a \
         multiple of {replicas}, as in mpirun -n {replicas}, or srun",
        if *ranks == 1 { "" } else { "s" }
    )]
    DoesNotDivide {
        /// Ranks in the world.
        ranks: usize,
        /// Replicas asked for.
        replicas: usize,
    },
    /// More ranks than there is work for.
    #[error(
        "{ranks} ranks are too many for {workers} devices of a pipeline: start at most {workers}"
    )]
    TooManyRanks {
        /// Ranks of a pipeline.
        ranks: usize,
        /// Devices that have a stage.
        workers: usize,
    },
    /// A rank that the world does not have.
    #[error("there is no rank {rank} among {size}: ranks are counted from 0")]
    NoRank {
        /// The one that was named.
        rank: usize,
        /// How many there are.
        size: usize,
    },
    /// Outputs that cannot be made where the closure did not run.
    #[error(
        "outputs of the type {name} cannot be rebuilt on a rank where the closure did not run: let it \
         give tensors, tuples of them, or a struct of such"
    )]
    NoForm {
        /// The type.
        name: String,
    },
    /// A message that could not be sent, or not be understood.
    #[error("messages between the ranks: {0}")]
    Message(String),
}

impl WorldError {
    /// Refuses what is not the same on all ranks.
    pub(crate) fn check_same(what: &str, found: Vec<String>) -> Result<(), Self> {
        match found.iter().all(|other| *other == found[0]) {
            true => Ok(()),
            false => Err(Self::Differs { what: what.to_owned(), found }),
        }
    }
}

/// What a rank failed with, of what others than that rank act on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum RankCause {
    /// Memory ran out.
    OutOfMemory(OutOfMemory),
    /// A loss or a gradient is not finite.
    NonFinite(NonFiniteValue),
}

fn said(words: &Option<String>) -> String {
    words.as_ref().map(|words| format!(": {words}")).unwrap_or_default()
}

/// Each value once, with the ranks that have it.
fn listed(found: &[String]) -> String {
    let mut seen: Vec<(&String, Vec<String>)> = Vec::new();
    for (rank, value) in found.iter().enumerate() {
        match seen.iter_mut().find(|(known, _)| *known == value) {
            Some((_, ranks)) => ranks.push(rank.to_string()),
            None => seen.push((value, vec![rank.to_string()])),
        }
    }
    let one = |(value, ranks): &(&String, Vec<String>)| {
        let word = if ranks.len() == 1 { "rank" } else { "ranks" };
        format!("{value} on {word} {}", ranks.join(", "))
    };
    seen.iter().map(one).collect::<Vec<_>>().join(" and ")
}
