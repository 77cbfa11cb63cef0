//! Errors between ranks.

use std::time::Duration;

use thiserror::Error;

use crate::oom::OutOfMemory;

/// Error between the ranks of a world.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum WorldError {
    /// MPI is missing or does not start.
    #[error("no world can be started: {reason}")]
    NotStarted {
        /// Reason.
        reason: String,
    },
    /// Lost rank: its heartbeat has stopped.
    #[error(
        "rank {rank} on {host} has sent no heartbeat for {} s: it was killed, stopped or cut off; start \
         again from the last saved model",
        silent.as_secs()
    )]
    RankLost {
        /// The number of the rank.
        rank: usize,
        /// The machine of the rank.
        host: String,
        /// Time since the rank's last heartbeat.
        silent: Duration,
    },
    /// Rank whose heartbeat continues but that keeps others waiting.
    #[error(
        "rank {rank} on {host} sends heartbeats, but has kept others waiting for {} s, longer than \
         `timeout`: it hangs, or needs a longer timeout; start again from the last saved model",
        waited.as_secs()
    )]
    RankHangs {
        /// The number of the rank.
        rank: usize,
        /// The machine of the rank.
        host: String,
        /// Time that other ranks have waited for the rank.
        waited: Duration,
    },
    /// Rank that has ended while others waited for it.
    #[error("rank {rank} on {host} has ended while others needed it{}", said(words))]
    RankLeft {
        /// The number of the rank.
        rank: usize,
        /// The machine of the rank.
        host: String,
        /// Reason that the rank sent, if any.
        words: Option<String>,
    },
    /// This rank, which the other ranks have given up because they received no heartbeat from it.
    #[error(
        "the other ranks count this one, rank {rank}, as lost, because they received no heartbeat from it"
    )]
    GivenUp {
        /// The number of the rank.
        rank: usize,
    },
    /// Rank on which a step failed.
    #[error("rank {rank} on {host}: {message}")]
    RankFailed {
        /// The number of the rank.
        rank: usize,
        /// The machine of the rank.
        host: String,
        /// The rank's error.
        message: String,
        /// Out-of-memory report, if memory ran out on the rank.
        out_of_memory: Option<Box<OutOfMemory>>,
        /// Description of the non-finite loss or gradient, if there was one.
        non_finite: Option<String>,
    },
    /// Value that differs between ranks.
    #[error("{what} must be the same on all ranks, but is {}", listed(found))]
    Differs {
        /// Name of the compared value.
        what: String,
        /// Value of each rank.
        found: Vec<String>,
    },
    /// Rank that makes a different call than this rank.
    #[error(
        "rank {rank} calls `{theirs}` where this one calls `{here}`: let all ranks make the same calls \
         in the same order"
    )]
    OutOfStep {
        /// Number of the other rank.
        rank: usize,
        /// The other rank's call.
        theirs: String,
        /// Call of this rank.
        here: String,
    },
    /// Number of ranks that is not a multiple of the number of replicas.
    #[error(
        "{ranks} rank{} cannot be divided into {replicas} replicas of equal size: start a multiple of \
         {replicas}, as in mpirun -n {replicas}, or srun",
        if *ranks == 1 { "" } else { "s" }
    )]
    DoesNotDivide {
        /// Number of ranks in the world.
        ranks: usize,
        /// Number of replicas asked for.
        replicas: usize,
    },
    /// More ranks than devices with a stage.
    #[error("a pipeline of {workers} devices cannot use {ranks} ranks: start at most {workers}")]
    TooManyRanks {
        /// Number of ranks of a pipeline.
        ranks: usize,
        /// Number of devices that have a stage.
        workers: usize,
    },
    /// Rank that does not exist.
    #[error("there is no rank {rank} in a world of {size}: ranks are counted from 0")]
    NoRank {
        /// Number that was given.
        rank: usize,
        /// Number of ranks.
        size: usize,
    },
    /// Outputs that cannot be rebuilt on a rank where the closure did not run.
    #[error(
        "outputs of the type {name} cannot be rebuilt on a rank where the closure did not run: let it \
         return tensors, tuples of tensors, or a struct of tensors"
    )]
    NoForm {
        /// Name of the type.
        name: String,
    },
    /// Message that could not be sent or decoded.
    #[error("a message between ranks could not be sent or decoded: {0}")]
    Message(String),
}

impl WorldError {
    /// Fails if the values of all ranks are not equal.
    pub(crate) fn check_same(what: &str, found: Vec<String>) -> Result<(), Self> {
        match found.iter().all(|other| *other == found[0]) {
            true => Ok(()),
            false => Err(Self::Differs { what: what.to_owned(), found }),
        }
    }
}

fn said(words: &Option<String>) -> String {
    words.as_ref().map(|words| format!(": {words}")).unwrap_or_default()
}

/// Lists each value once, with the ranks that have it.
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
