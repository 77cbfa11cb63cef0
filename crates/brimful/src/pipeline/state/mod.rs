//! What a pipeline has from step to step: variables, optimizers and averages, looked at, saved and loaded.

mod ema;
mod optimizer;
mod optimizer_state;
mod saved;

pub use ema::PipelineEma;
pub use optimizer::PipelineOptimizer;
