//! Schedules: the order in which a pipeline's devices run their actions.
//!
//! [`Schedule`] names one, [`Actions`] are its lists, and [`simulate`] runs them on given [`Costs`]. The crate
//! `brimful_plan` has the rest: transfers over the host link, and the search for automatic schedules.

#[doc(inline)]
pub use brimful_plan::schedule::{
    Action, ActionKind, Actions, CostError, Costs, DeviceId, HostLinkUse, Location, MicroBatchId,
    Recompute, Schedule, ScheduleError, Simulation, Span, StageCost, StageId, TransferError,
    render, simulate,
};
