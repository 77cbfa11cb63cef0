//! Agreement between ranks: exchanges of values, and votes on whether all ranks succeeded.

use std::collections::VecDeque;
use std::fmt::Display;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::World;
use super::error::WorldError;
use super::link::Look;
use super::message::{Message, decode, encode};
use super::messenger::{Messenger, Value};
use super::waits::Wait;
use crate::oom::OutOfMemory;
use crate::{Error, Result};

/// Failure of a rank as reported to the others.
#[derive(Debug, Serialize, Deserialize)]
struct ReportedFailure {
    /// Time since the collective began.
    at: Duration,
    message: String,
    out_of_memory: Option<Box<OutOfMemory>>,
    non_finite: Option<String>,
}

impl World {
    /// Sends a value to all ranks and returns the values of all, in the order of the ranks. All ranks make the
    /// same calls in the same order; `what` names this call.
    ///
    /// # Errors
    /// When a rank is lost, has ended, or makes a different call.
    pub fn share<T>(&self, what: &str, value: &T) -> Result<Vec<T>>
    where
        T: Serialize + for<'a> Deserialize<'a>,
    {
        let all = self.share_bytes(what, encode(value)?)?;
        all.iter().map(|bytes| Ok(decode(bytes)?)).collect()
    }

    fn share_bytes(&self, what: &str, own: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        let Some(member) = &self.0 else { return Ok(vec![own]) };
        let number = member.link.with(|engine| {
            engine.moments += 1;
            let number = engine.moments;
            engine.tell_all(&Message::Value { number, what: what.to_owned(), bytes: own.clone() });
            number
        })?;
        member.link.wait(|engine| Ok(said(engine, number, what, &own)?))
    }

    /// Checks that all ranks have the same value; `what` names the value in the error.
    ///
    /// # Errors
    /// When values differ: on every rank, with the value of each. As for [`World::share`].
    pub fn agree(&self, what: &str, value: &impl Display) -> Result<()> {
        Ok(WorldError::check_same(what, self.share(what, &value.to_string())?)?)
    }

    /// Returns the results of all ranks if all succeeded; otherwise every rank gets the earliest error.
    /// `at` is the time of this rank's error since the collective began.
    ///
    /// # Errors
    /// The earliest error, which names the rank. As for [`World::share`].
    pub fn vote<T>(&self, what: &str, result: Result<T>, at: Duration) -> Result<Vec<T>>
    where
        T: Serialize + for<'a> Deserialize<'a>,
    {
        if self.size() == 1 {
            return Ok(vec![result?]);
        }
        let reported = result.as_ref().map_err(|error| ReportedFailure {
            at,
            message: error.to_string(),
            out_of_memory: error.out_of_memory().cloned().map(Box::new),
            non_finite: error.non_finite(),
        });
        // Sent even if this rank has failed, because a rank that does not answer makes all others wait.
        let own = encode(&reported)?;
        let all = self.share_bytes(what, own)?;
        let mut results = Vec::with_capacity(all.len());
        let mut first: Option<(usize, ReportedFailure)> = None;
        for (rank, bytes) in all.iter().enumerate() {
            match decode::<std::result::Result<T, ReportedFailure>>(bytes)? {
                Ok(result) => results.push(result),
                Err(failure) if first.as_ref().is_none_or(|(_, first)| failure.at < first.at) => {
                    first = Some((rank, failure));
                }
                Err(_) => {}
            }
        }
        match (first, result) {
            (None, _) => Ok(results),
            // This rank has the original error; the other ranks have only the error's message.
            (Some((rank, _)), Err(error)) if rank == self.rank() => Err(error),
            (Some((rank, failure)), _) => Err(self.failed(rank, failure)),
        }
    }

    fn failed(&self, rank: usize, failure: ReportedFailure) -> Error {
        let ReportedFailure { message, out_of_memory, non_finite, .. } = failure;
        let host = self.hosts()[rank].clone();
        WorldError::RankFailed { rank, host, message, out_of_memory, non_finite }.into()
    }
}

/// Returns the values of all ranks in this exchange, once all have arrived.
fn said(
    engine: &mut Messenger,
    number: u64,
    what: &str,
    own: &[u8],
) -> Result<Look<Vec<Vec<u8>>>, WorldError> {
    let mut fronts =
        engine.values.iter().enumerate().filter_map(|(r, list)| Some((r, list.front()?)));
    let differs = |(_, value): &(usize, &Value)| value.number != number || value.what != what;
    let other = fronts.find(differs).map(|(rank, value)| (rank, value.what.clone()));
    if let Some((rank, theirs)) = other {
        let here = what.to_owned();
        return Err(engine.confuse(WorldError::OutOfStep { rank, theirs, here }));
    }
    let me = engine.rank;
    let values = &mut engine.values;
    if let Some(rank) = (0..values.len()).find(|rank| *rank != me && values[*rank].is_empty()) {
        return Ok(Look::WaitFor(Wait::Rank(rank)));
    }
    let take = |list: &mut VecDeque<Value>| list.pop_front().map(|value| value.bytes);
    let all = values.iter_mut().map(|list| take(list).unwrap_or_else(|| own.into()));
    Ok(Look::Found(all.collect()))
}
