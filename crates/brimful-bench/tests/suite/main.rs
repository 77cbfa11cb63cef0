//! Tests of the benchmarks as users run them, one module a subject.

mod auto;
mod cli;
mod convergence;
mod finetune;
mod kernels;
mod loader;
mod memory;
mod micro;
mod norms;
mod offload;
mod pipeline;
mod program;
mod ragged;
mod split_backward;
mod tables;
