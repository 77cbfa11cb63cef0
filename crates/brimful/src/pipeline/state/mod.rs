//! State of a pipeline between steps: variables, and the parts of optimizers and averages.

mod parts;
mod variables;

pub(crate) use parts::{clip_worker_gradients, made_optimizer, settled_ema, settled_optimizer};
