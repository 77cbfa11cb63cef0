//! Chooses balance, schedule, number of micro-batches, and each stage's recomputation, for the shortest
//! step that fits.
//!
//! ```
//! use brimful_plan::balance::{LayerCost, Profile};
//! use brimful_plan::plan::{PlanDevice, Request, plan};
//!
//! let times = LayerCost { forward: 0.01, backward: 0.02, ..LayerCost::default() };
//! let layer = LayerCost { activation_bytes: 1 << 20, ..times };
//! let profile = Profile { layers: vec![layer; 12], ..Profile::default() };
//! let device = PlanDevice { memory: Some(64 << 20), ..PlanDevice::default() };
//!
//! let plan = plan(&Request::new(&profile, vec![device; 4], 64))?;
//! let best = plan.best().expect("something fits");
//! println!("{}, balance {}: {:.2} s", best.choice, best.balance, best.makespan);
//! # Ok::<(), brimful_plan::plan::PlanError>(())
//! ```

mod choice;
mod error;
mod kept;
mod knapsack;
pub mod offload;
mod planned_stage;
mod request;
mod row;
mod search;
mod stage_costs;
mod step;
mod with_offload;

use serde::Serialize;

pub use choice::PlanChoice;
pub use error::{Misfit, PlanError, Reason, Refusal};
pub use planned_stage::PlannedStage;
pub use request::{PlanDevice, Request};
pub use row::{PlanRow, misfits};
pub use step::PlannedStep;

/// Result of planning.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
    /// All ways to run the step, the best first; those that do not fit come last, with their misfits.
    pub rows: Vec<PlanRow>,
    /// Combinations that cannot be built.
    #[serde(skip)]
    pub refused: Vec<Refusal>,
}

impl Plan {
    /// Returns the shortest step that fits.
    #[must_use]
    pub fn best(&self) -> Option<&PlanRow> {
        self.rows.iter().find(|row| row.fits)
    }
}

/// Simulates every combination of the request's choices, and ranks them. If none fits and the request has
/// host memory, stages may be offloaded, with a breadth-first schedule.
///
/// # Errors
/// If the request has invalid numbers, or none of its combinations can be built.
pub fn plan(request: &Request<'_>) -> Result<Plan, PlanError> {
    plan_watched(request, |_| {})
}

/// Plans as [`plan`] does; calls `watch` with each combination as soon as it is simulated.
///
/// # Errors
/// As for [`plan`].
pub fn plan_watched(
    request: &Request<'_>,
    mut watch: impl FnMut(PlanChoice),
) -> Result<Plan, PlanError> {
    request.check()?;
    let mut plan = Plan { rows: Vec::new(), refused: Vec::new() };
    for choice in request.choices() {
        match search::best_row(request, choice)? {
            Ok(row) => plan.rows.push(row),
            Err(refusal) => plan.refused.push(refusal),
        }
        watch(choice);
    }
    // Offloading is planned only if nothing else fits, because choosing the stages to offload needs many
    // simulations.
    if let Some(memory) = request.host_memory.filter(|_| !plan.rows.iter().any(|row| row.fits)) {
        plan.rows.extend(with_offload::rows(request, memory)?);
    }
    rank(&mut plan.rows);
    match plan.refused.first() {
        Some(first) if plan.rows.is_empty() => {
            let first = Box::new(first.clone());
            Err(PlanError::NothingBuilt { count: plan.refused.len(), first })
        }
        _ => Ok(plan),
    }
}

fn rank(rows: &mut [PlanRow]) {
    let shortest = rows.iter().map(|row| row.makespan).fold(f64::INFINITY, f64::min);
    // Makespans are sums in different orders, so equal ones can differ by rounding. They must compare as equal, or
    // the smaller memory would never decide. They are compared in whole units, because a comparison with a
    // tolerance is not transitive.
    let unit = f64::max(shortest * 1e-9, f64::MIN_POSITIVE);
    rows.sort_by(|a, b| a.rank(b, unit));
}
