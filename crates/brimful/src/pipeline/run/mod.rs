//! Runs one worker's part of a step: its list of actions, in order.
//!
//! ```text
//!   F   receive the input · run the layers · send the output          keeps the input and the output's graph
//!   R   run the layers again (activation recomputation)               keeps the output's graph
//!   B   receive the output's gradient · run backward · send the input's      keeps nothing
//!   I   receive the output's gradient · compute dX · send it                 keeps what dW needs
//!   W   compute dW                                                           keeps nothing
//! ```
//!
//! A forward with recomputation keeps only its input, unless the device has free bytes for its activations:
//! then R does nothing. On the last stage no other stage waits for such a forward, so the stage skips it
//! and runs only R.

mod at_barrier;
mod backward;
mod barrier;
mod exchange;
mod failure;
mod intake;
mod job;
mod timeline;
mod wiring;
mod worker_run;

pub(crate) use failure::WorkerFailure;
pub(crate) use job::{End, Job, LossFn, Mode};
pub(crate) use wiring::wire;
pub(crate) use worker_run::WorkerRun;
