//! State of a pipeline between steps: variables, optimizers and averages, with their access, saving and
//! loading.

mod ema;
mod optimizer;
mod optimizer_state;
mod saved;

pub use ema::PipelineEma;
pub use optimizer::PipelineOptimizer;
