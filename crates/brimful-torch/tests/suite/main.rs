//! Tests of the bridge to libtorch, one module a subject.

mod bridge;
mod fake_compiler;
mod graph;
#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod host;
mod kernels_batch_norm;
mod kernels_cache;
mod leaves;
mod many_tensors;
mod meta;
mod own_generator;
mod split_backward;
mod test_device;
mod touched;
mod updates;
