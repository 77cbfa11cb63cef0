//! Several processes that train one model: the ranks of a world.
//!
//! They are started by `mpirun` or `srun`, on one machine or on many, and all run the same program
//! ([`World::start`], with the feature `mpi`); a process can also be alone ([`World::alone`]). All
//! ranks make the same calls in the same order, with the same mini-batches.
//!
//! ```text
//!   what is called           ── agree, share, settle ──   all ranks know, or all have the error
//!   tensors                  ── turn: outlet, inlet, sum ──   point to point, while others compute
//!   messages                 engine: announced, asked for, arrived      pulse: who is still there
//!   the wire                 MPI
//! ```
//!
//! *No hang.* Every rank gives signs of life, from a thread of its own. One that is killed, stopped
//! or cut off is given up after [`World::patience`], and every wait of the others ends with an error
//! that names it. So is one that gives signs of life but is waited for longer than
//! [`World::longest_wait`]. A rank whose step fails tells the others at once.

#![cfg_attr(
    not(feature = "mpi"),
    allow(dead_code, reason = "a process that is always alone has nobody to watch")
)]

mod agree;
mod collective;
mod error;
mod inbox;
mod link;
mod message;
mod messenger;
#[cfg(feature = "mpi")]
mod mpi;
mod outbox;
mod pulse;
mod ring;
#[cfg(test)]
mod test_wire;
mod traffic;
mod turn;
mod waits;
mod wire;

use std::sync::Arc;
use std::time::Duration;

pub use error::{RankCause, WorldError};
pub use traffic::Traffic;

use crate::Result;
use link::{Link, Pump};
pub(crate) use message::Tensors;
use messenger::Messenger;
pub(crate) use turn::{Inlet, Outlet, Stopped, Summing, Turn};
use wire::{Alone, Wire};

/// How long a rank may be silent, unless told otherwise.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long a rank may be waited for, unless told otherwise.
const LONGEST_WAIT: Duration = Duration::from_secs(30 * 60);

/// All processes that train together, as one of them sees it.
///
/// Clones are the same world. When the last is dropped, this rank has ended: it waits until all
/// others end too, or are lost.
#[derive(Debug, Clone)]
pub struct World(Arc<Membership>);

#[derive(Debug)]
struct Membership {
    rank: usize,
    hosts: Vec<String>,
    link: Arc<Link>,
    /// Ends this rank's part when it is dropped; a process alone needs none.
    _pump: Option<Pump>,
}

/// What ranks tell each other first.
#[cfg(feature = "mpi")]
#[derive(Debug, serde::Serialize, serde::Deserialize)]
struct Greeting {
    version: String,
    host: String,
}

impl World {
    /// Joins the world that `mpirun` or `srun` has started; without them, a world of one. A process
    /// can do so once.
    ///
    /// # Errors
    /// When MPI cannot be started, or the ranks run different versions of this library.
    // The pages show it without MPI too.
    #[cfg(any(feature = "mpi", doc))]
    pub fn start() -> Result<Self> {
        Self::over(|| Ok(Box::new(mpi::MpiWire::start(PATIENCE)?)))
    }

    /// A world of this process alone.
    pub fn alone() -> Self {
        let link = Link::new(Messenger::new(Box::new(Alone), PATIENCE, LONGEST_WAIT));
        let hosts = vec![Alone.host()];
        Self(Arc::new(Membership { rank: 0, hosts, link, _pump: None }))
    }

    /// The world at the end of a wire, which is started and ended by one thread.
    #[cfg(feature = "mpi")]
    fn over(
        wire: impl FnOnce() -> Result<Box<dyn Wire>, WorldError> + Send + 'static,
    ) -> Result<Self> {
        let pump = Pump::start(move || Ok(Messenger::new(wire()?, PATIENCE, LONGEST_WAIT)))?;
        let link = Arc::clone(&pump.link);
        let (rank, hosts) = link.with(|engine| (engine.rank, engine.hosts.clone()))?;
        let host = hosts[rank].clone();
        let mut member = Arc::new(Membership { rank, hosts, link, _pump: Some(pump) });
        // Before anything else: messages of another version may not even decode.
        let greeting = Greeting { version: env!("CARGO_PKG_VERSION").to_owned(), host };
        let all = Self(Arc::clone(&member)).share("greeting", &greeting)?;
        let versions = all.iter().map(|greeting| greeting.version.clone()).collect();
        WorldError::check_same("the version of brimful", versions)?;
        let hosts: Vec<String> = all.into_iter().map(|greeting| greeting.host).collect();
        member.link.with(|engine| engine.hosts.clone_from(&hosts))?;
        Arc::get_mut(&mut member).expect("nobody else has it yet").hosts = hosts;
        Ok(Self(member))
    }

    /// This process's number, from 0 on.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// This process's number among those on its machine, such as that of the device that is its own.
    pub fn rank_on_host(&self) -> usize {
        let hosts = self.hosts();
        let rank = self.rank();
        hosts[..rank].iter().filter(|host| **host == hosts[rank]).count()
    }

    /// How many processes there are.
    pub fn size(&self) -> usize {
        self.0.hosts.len()
    }

    /// The machine that each rank runs on.
    pub fn hosts(&self) -> &[String] {
        &self.0.hosts
    }

    /// After how much silence a rank is given up: 30 s, unless it was set.
    ///
    /// # Errors
    /// When the world has ended.
    pub fn patience(&self) -> Result<Duration> {
        self.link().with(|engine| engine.pulse.patience)
    }

    /// Sets after how much silence a rank is given up. All ranks set the same: a rank gives ten signs
    /// of life within its own patience.
    ///
    /// # Errors
    /// When the world has ended.
    pub fn set_patience(&self, patience: Duration) -> Result<()> {
        self.link().with(|engine| engine.pulse.patience = patience)
    }

    /// After how long a rank is given up that is waited for although it gives signs of life: because
    /// its data never come, say. 30 minutes, unless it was set.
    ///
    /// # Errors
    /// When the world has ended.
    pub fn longest_wait(&self) -> Result<Duration> {
        self.link().with(|engine| engine.waits.longest)
    }

    /// Sets for how long this rank waits for another: longer than what one rank does alone, such as
    /// an evaluation.
    ///
    /// # Errors
    /// When the world has ended.
    pub fn set_longest_wait(&self, longest: Duration) -> Result<()> {
        self.link().with(|engine| engine.waits.longest = longest)
    }

    /// What this rank has sent so far.
    ///
    /// # Errors
    /// When the world has ended.
    pub fn traffic(&self) -> Result<Traffic> {
        self.link().with(|engine| engine.traffic)
    }

    /// Begins something that ranks do together.
    pub(crate) fn turn(&self) -> Result<Turn> {
        Turn::begin(self.link(), self.rank())
    }

    fn link(&self) -> &Arc<Link> {
        &self.0.link
    }
}

#[cfg(all(test, feature = "mpi"))]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    /// MPI wants to be ended by the thread that has started it, whoever drops the world.
    #[test]
    fn the_wire_is_ended_by_the_thread_that_has_started_it() {
        let (mut wires, observer) = test_wire::wires(1, 64);
        let (wire, (tell, told)) = (wires.pop().expect("one"), mpsc::channel());
        let start = move || {
            tell.send(thread::current().id()).expect("heard");
            Ok(wire)
        };
        let world = World::over(start).expect("a world");
        thread::spawn(move || drop(world)).join().expect("dropped elsewhere");
        assert_eq!(observer.ended_by(), told.recv().ok());
    }

    #[test]
    fn a_wire_that_does_not_start_is_told() {
        let not_started = || WorldError::NotStarted { reason: "no wire".into() };
        let error = World::over(move || Err(not_started())).expect_err("no wire");
        assert_eq!(error, not_started().into());
    }
}
