//! What two micro-batches must have in common to be the same work.

use std::any::TypeId;

use tch::Kind;

use crate::batch::Batch;

/// The shape of a micro-batch, and which closure runs on it.
#[derive(Debug, PartialEq)]
pub(super) struct Shape {
    closure: TypeId,
    /// Whether its mini-batch is a step of its own, which decides on what terms are divided by.
    single: bool,
    /// All that is not a tensor.
    outline: Vec<String>,
    leaves: Vec<(Vec<i64>, Kind)>,
}

impl Shape {
    pub(super) fn of<B: Batch, F>(micro_batch: &B, single: bool) -> Self {
        let (mut outline, mut leaves) = (Vec::new(), Vec::new());
        micro_batch.outline(&mut |line| outline.push(line.to_string()));
        micro_batch.visit(&mut |leaf| {
            let tensor = leaf.tensor();
            leaves.push((tensor.size(), tensor.kind()));
        });
        Self { closure: typeid::of::<F>(), single, outline, leaves }
    }
}
