//! Tests of the library, one module a subject. `promises` and `differential` are programs of their own.

mod arenas;
mod atomic;
mod auto;
mod batch_norm;
mod batch_norm_relu;
mod batches;
mod cuda_graphs;
mod cuda_graphs_auto;
mod cuda_graphs_out_of_date;
mod cuda_graphs_stress;
#[cfg(feature = "mpi")]
mod data_parallel;
mod ema;
mod gradient_mode;
mod import_circles;
mod in_place;
mod killed_saves;
mod linear_cross_entropy;
mod measure;
mod memory_format;
#[cfg(feature = "mpi")]
mod mpi_messages;
mod offload;
mod offload_auto;
mod offload_memory;
mod optim;
mod order_of_modules;
mod other_leaves;
mod out_of_memory;
mod pipeline;
mod pipeline_auto;
mod pipeline_faults;
mod pipeline_memory;
mod replicas;
mod replicas_as_micro_batcher;
mod replicas_faults;
mod save;
mod sparse;
mod streams;
mod support;
mod torch_script;
mod transformer_layers;
mod transparency;
mod walk_of_a_step;
mod weight_decay;
#[cfg(feature = "mpi")]
mod world;
#[cfg(feature = "mpi")]
mod world_faults;
#[cfg(feature = "mpi")]
mod world_pipeline;
