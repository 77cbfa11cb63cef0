//! Processes that train one model together: the ranks of a world.
//!
//! `mpirun` or `srun` starts them, on one machine or on many, and all run the same program
//! ([`World::start`], with the feature `mpi`); a process can also be alone ([`World::alone`]). All ranks
//! make the same calls in the same order. The ranks of one pipeline pass the same mini-batches; each replica
//! passes different samples.
//!
//! ```text
//!   calls                    ── agree, share, vote ──   all ranks get the values, or the error
//!   tensors                  ── collective: outlet, inlet, sum ──   point to point, while others compute
//!   messages                 messenger: announced, posted, received     pulse: heartbeats
//!   wire                     MPI
//! ```
//!
//! *No hang.* Every rank sends heartbeats from a separate thread. A rank that is killed, stopped or cut off is
//! given up after [`World::heartbeat_timeout`], and every wait of the others ends with an error that names the
//! lost rank. A rank whose heartbeat continues is given up if another rank waits for it longer than
//! [`World::timeout`]. A rank whose step fails reports the failure to the others at once.

#![cfg_attr(
    not(feature = "mpi"),
    allow(dead_code, reason = "a process that is always alone has nobody to watch")
)]

mod agree;
mod channels;
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
mod waits;
mod wire;

use std::sync::{Arc, LazyLock};
use std::time::Duration;

pub use error::WorldError;
#[doc(hidden)]
pub use traffic::Traffic;

use crate::Result;
pub(crate) use channels::{Collective, Inlet, Outlet, Stopped, Summing};
use link::{Link, Pump};
pub(crate) use message::Tensors;
use messenger::Messenger;
#[cfg(feature = "mpi")]
use wire::Wire;

/// Default time without a heartbeat after which a rank is given up.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(30);
/// Default time that a rank may be waited for.
const TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// World of all processes that train together.
///
/// Clones share one world. Dropping the last clone ends this rank: the drop waits until all other ranks end too,
/// or until a rank is lost.
#[derive(Debug, Clone)]
pub struct World(Option<Arc<Membership>>);

/// Machine of a process that is alone.
static THIS_MACHINE: LazyLock<[String; 1]> = LazyLock::new(|| ["this machine".to_owned()]);

#[derive(Debug)]
struct Membership {
    rank: usize,
    hosts: Vec<String>,
    link: Arc<Link>,
    /// Ends this rank's part when it is dropped.
    _pump: Pump,
}

/// First message of each rank.
#[cfg(feature = "mpi")]
#[derive(Debug, serde::Serialize, serde::Deserialize)]
struct Greeting {
    version: String,
    host: String,
}

impl World {
    /// Joins the world that `mpirun` or `srun` has started; without `mpirun` or `srun`, creates a world of one
    /// rank. Call this function at most once in a process.
    ///
    /// # Errors
    /// When MPI cannot be started, or the ranks run different versions of this library.
    // Documented even without MPI.
    #[cfg(any(feature = "mpi", doc))]
    pub fn start() -> Result<Self> {
        Self::over(|| Ok(Box::new(mpi::MpiWire::start(HEARTBEAT_TIMEOUT)?)))
    }

    /// Creates a world of this process alone.
    pub fn alone() -> Self {
        Self(None)
    }

    /// Creates the world on a wire, which one thread starts and ends.
    #[cfg(feature = "mpi")]
    fn over(
        wire: impl FnOnce() -> Result<Box<dyn Wire>, WorldError> + Send + 'static,
    ) -> Result<Self> {
        let pump = Pump::start(move || Ok(Messenger::new(wire()?, HEARTBEAT_TIMEOUT, TIMEOUT)))?;
        let link = Arc::clone(&pump.link);
        let (rank, hosts) = link.with(|engine| (engine.rank, engine.hosts.clone()))?;
        let host = hosts[rank].clone();
        let mut member = Arc::new(Membership { rank, hosts, link, _pump: pump });
        // Exchanges the versions first, because messages of a different version may not even decode.
        let greeting = Greeting { version: env!("CARGO_PKG_VERSION").to_owned(), host };
        let all = Self(Some(Arc::clone(&member))).share("greeting", &greeting)?;
        let versions = all.iter().map(|greeting| greeting.version.clone()).collect();
        WorldError::check_same("the version of brimful", versions)?;
        let hosts: Vec<String> = all.into_iter().map(|greeting| greeting.host).collect();
        member.link.with(|engine| engine.hosts.clone_from(&hosts))?;
        Arc::get_mut(&mut member).expect("nobody else has it yet").hosts = hosts;
        Ok(Self(Some(member)))
    }

    /// Returns this process's number, from 0 on.
    pub fn rank(&self) -> usize {
        self.0.as_ref().map_or(0, |member| member.rank)
    }

    /// Returns this process's number among the processes on its machine. A program can choose its device by this
    /// number.
    pub fn rank_on_host(&self) -> usize {
        let hosts = self.hosts();
        let rank = self.rank();
        hosts[..rank].iter().filter(|host| **host == hosts[rank]).count()
    }

    /// Returns the number of processes.
    pub fn size(&self) -> usize {
        self.hosts().len()
    }

    /// Returns the machine of each rank.
    pub fn hosts(&self) -> &[String] {
        self.0.as_ref().map_or(&*THIS_MACHINE, |member| &member.hosts)
    }

    /// Returns the time without a heartbeat after which a rank is given up: 30 s by default.
    ///
    /// # Errors
    /// When the world has ended.
    pub fn heartbeat_timeout(&self) -> Result<Duration> {
        self.with(HEARTBEAT_TIMEOUT, |engine| engine.pulse.heartbeat_timeout)
    }

    /// Sets the time without a heartbeat after which a rank is given up. All ranks must set the same timeout,
    /// because a rank sends ten heartbeats within its own timeout. A world of one process ignores it.
    ///
    /// # Errors
    /// When the world has ended.
    pub fn set_heartbeat_timeout(&self, heartbeat_timeout: Duration) -> Result<()> {
        self.with((), |engine| engine.pulse.heartbeat_timeout = heartbeat_timeout)
    }

    /// Returns the longest time that this rank waits for another rank whose heartbeat continues: 30 minutes by
    /// default. After this time, it gives up the other rank.
    ///
    /// # Errors
    /// When the world has ended.
    pub fn timeout(&self) -> Result<Duration> {
        self.with(TIMEOUT, |engine| engine.waits.longest)
    }

    /// Sets how long this rank waits for another rank. The time must be longer than any work that one rank does
    /// alone, such as an evaluation. A world of one process waits for nobody, and ignores it.
    ///
    /// # Errors
    /// When the world has ended.
    pub fn set_timeout(&self, longest: Duration) -> Result<()> {
        self.with((), |engine| engine.waits.longest = longest)
    }

    /// Returns the amount of data that this rank has sent so far.
    ///
    /// # Errors
    /// When the world has ended.
    pub fn traffic(&self) -> Result<Traffic> {
        self.with(Traffic::default(), |engine| engine.traffic)
    }

    /// Begins a collective of the ranks.
    pub(crate) fn collective(&self) -> Result<Collective> {
        match &self.0 {
            Some(member) => Collective::begin(&member.link, member.rank),
            None => Ok(Collective(None)),
        }
    }

    /// Runs `f` on the messages; returns `alone` if this process is alone.
    fn with<T>(&self, alone: T, f: impl FnOnce(&mut Messenger) -> T) -> Result<T> {
        self.0.as_ref().map_or(Ok(alone), |member| member.link.with(f))
    }
}

#[cfg(all(test, feature = "mpi"))]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    /// MPI must be ended by the thread that has started it, whichever thread drops the world.
    #[test]
    fn the_wire_is_ended_by_the_thread_that_has_started_it() {
        let (mut wires, observer) = test_wire::wires(1, 64);
        let (wire, (tell, reported)) = (wires.pop().expect("one"), mpsc::channel());
        let start = move || {
            tell.send(thread::current().id()).expect("heard");
            Ok(wire)
        };
        let world = World::over(start).expect("a world");
        thread::spawn(move || drop(world)).join().expect("dropped elsewhere");
        assert_eq!(observer.ended_by(), reported.recv().ok());
    }

    #[test]
    fn a_wire_that_does_not_start_is_reported() {
        let not_started = || WorldError::NotStarted { reason: "no wire".into() };
        let error = World::over(move || Err(not_started())).expect_err("no wire");
        assert_eq!(error, not_started().into());
    }
}
