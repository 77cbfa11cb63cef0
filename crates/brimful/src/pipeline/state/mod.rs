//! What a pipeline has from step to step: variables and optimizers, looked at, saved and loaded.

mod optimizer;
mod optimizer_state;
mod saved;

pub use optimizer::PipelineOptimizer;
