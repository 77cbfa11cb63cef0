//! Chooses where each stage lives, and what it keeps, recomputes or offloads, for the shortest step
//! within the devices' memory.
//!
//! ```
//! # use brimful_plan as brimful;
//! use brimful::plan::homes::{HomeRequest, choose};
//! use brimful::schedule::{BusCost, Costs, Schedule, StageCost};
//!
//! let stage = StageCost {
//!     parameter_bytes: 400, gradient_bytes: 400, optimizer_bytes: 800, home_bytes: 600,
//!     fetched_bytes: 200, sent_bytes: 400, activation_bytes: 100, output_bytes: 10,
//!     ..StageCost::new(1.0, 1.0, 1.0)
//! };
//! let costs = Costs { bus: BusCost::equal(100.0), ..Costs::equal(12, stage) };
//! let schedule = Schedule::BreadthFirst { stages_per_device: 12 };
//! let request = HomeRequest { memory: vec![Some(6_000)], ..HomeRequest::new(&costs, schedule, 1, 8) };
//! let choice = choose(&request)?;
//! assert!(choice.peak_bytes()[0] <= 6_000);
//! println!("{} of 12 stages live on the host: {} s", choice.at_host(), choice.simulation.makespan());
//! # Ok::<(), brimful::plan::homes::HomeError>(())
//! ```
//!
//! How: what each stage would cost in each of its ways is estimated for itself, and a knapsack over
//! whole devices takes the best ways that fit, exactly for these estimates. What the estimates leave out
//! (fetches that hide behind a neighbour, what is there at the same time) the simulation tells: each
//! answer is simulated, the room is corrected by what was over or left, and in the end single stages
//! are changed as long as the simulated step gets shorter.

mod choice;
mod error;
mod search;
mod ways;

use crate::schedule::{Costs, Home, Schedule};

pub use choice::HomeChoice;
pub use error::HomeError;

/// A question: a pipeline whose stages are cut, its devices, and the host. All its stages are trained.
#[derive(Debug, Clone)]
pub struct HomeRequest<'a> {
    /// What each stage costs, and the bus.
    pub costs: &'a Costs,
    /// The order of the actions.
    pub schedule: Schedule,
    /// The number of micro-batches.
    pub micro_batches: usize,
    /// How many bytes each device has for us; `None` is no limit.
    pub memory: Vec<Option<u64>>,
    /// How many bytes the host has for us; `None` is no limit.
    pub host_memory: Option<u64>,
    /// Pairs of stages of one device that share parameters, which live in one place.
    pub ties: Vec<(usize, usize)>,
    /// Where all stages live; `None` chooses, as many on their devices as fit.
    pub home: Option<Home>,
}

impl<'a> HomeRequest<'a> {
    /// Without any limit, and homes to be chosen.
    #[must_use]
    pub fn new(costs: &'a Costs, schedule: Schedule, devices: usize, micro_batches: usize) -> Self {
        Self {
            costs,
            schedule,
            micro_batches,
            memory: vec![None; devices],
            host_memory: None,
            ties: Vec::new(),
            home: None,
        }
    }
}

/// The shortest step that fits.
///
/// # Errors
/// Where nothing fits: which stage is too large, or what the host lacks; and where costs or schedule
/// are none.
pub fn choose(request: &HomeRequest<'_>) -> Result<HomeChoice, HomeError> {
    search::Search::new(request)?.best()
}
