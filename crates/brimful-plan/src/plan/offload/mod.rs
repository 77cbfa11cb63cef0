//! Chooses which stages to offload, and what each keeps, recomputes or offloads, for the shortest step
//! within the devices' memory.
//!
//! ```
//! use brimful_plan::plan::offload::{OffloadRequest, choose};
//! use brimful_plan::schedule::{Costs, Schedule, StageCost};
//! use brimful_plan::schedule::{HostLinkCost};
//!
//! let stage = StageCost {
//!     parameter_bytes: 400, gradient_bytes: 400, optimizer_bytes: 800, offloaded_bytes: 600,
//!     fetched_bytes: 200, sent_bytes: 400, activation_bytes: 100, output_bytes: 10,
//!     ..StageCost::new(1.0, 1.0, 1.0)
//! };
//! let costs = Costs { host_link: HostLinkCost::equal(100.0), ..Costs::equal(12, stage) };
//! let schedule = Schedule::BreadthFirst { stages_per_device: 12 };
//! let request = OffloadRequest { memory: vec![Some(6_000)], ..OffloadRequest::new(&costs, schedule, 1, 8) };
//! let choice = choose(&request)?;
//! assert!(choice.peak_bytes()[0] <= 6_000);
//! println!("{} of 12 stages are offloaded: {} s", choice.at_host(), choice.simulation.makespan());
//! # Ok::<(), brimful_plan::plan::offload::OffloadError>(())
//! ```
//!
//! The search first estimates the cost of each way to run a stage, separately for each stage. A knapsack for
//! each device then picks the best ways that fit by these estimates. The estimates leave out interactions:
//! fetches that overlap with a neighbour's compute, and bytes in use at the same time. So each result is
//! simulated, and the excess or the free bytes correct the knapsack's capacity. In the end, single stages and
//! pairs of stages are changed while the simulated step gets shorter.

mod choice;
mod error;
mod search;
mod ways;

use crate::schedule::{Costs, Location, Schedule};

pub use choice::OffloadChoice;
pub use error::OffloadError;

/// Request: a pipeline with a given balance, its devices, and the host. All its stages are trained.
#[derive(Debug, Clone)]
pub struct OffloadRequest<'a> {
    /// Costs of each stage and of the host link.
    pub costs: &'a Costs,
    /// Order of the actions.
    pub schedule: Schedule,
    /// Number of micro-batches.
    pub micro_batches: usize,
    /// Memory of each device in bytes; `None` for no limit.
    pub memory: Vec<Option<u64>>,
    /// Memory of the host in bytes; `None` for no limit.
    pub host_memory: Option<u64>,
    /// Pairs of stages on one device that share parameters; both are offloaded, or neither.
    pub ties: Vec<(usize, usize)>,
    /// Place of all stages' weights; `None` chooses it, with as many stages on their devices as fit.
    pub location: Option<Location>,
}

impl<'a> OffloadRequest<'a> {
    /// Returns a request without limits, which lets the search choose the place of each stage's weights.
    #[must_use]
    pub fn new(costs: &'a Costs, schedule: Schedule, devices: usize, micro_batches: usize) -> Self {
        Self {
            costs,
            schedule,
            micro_batches,
            memory: vec![None; devices],
            host_memory: None,
            ties: Vec::new(),
            location: None,
        }
    }
}

/// Returns the shortest step that fits.
///
/// # Errors
/// If costs or schedule are invalid, or nothing fits. In the latter case the error names the stage that is too
/// large, or the memory that the host lacks.
pub fn choose(request: &OffloadRequest<'_>) -> Result<OffloadChoice, OffloadError> {
    search::Search::new(request)?.best()
}
