//! Variables by their names: listed, copied, given values, and left without gradients.

use brimful::optim::Optimizer;
use brimful::pipeline::PipelineOptimizer;
use brimful_torch::autograd::set_gradient;
use tch::Tensor;
use tch::nn::VarStore;

use super::numbers;

/// Tensors with their names, in order.
pub type Named = Vec<(String, Tensor)>;

/// All variables of a store.
pub fn variables(store: &VarStore) -> Named {
    let mut all: Named = store.variables().into_iter().collect();
    all.sort_by(|(a, _), (b, _)| a.cmp(b));
    all
}

/// The gradients that are there.
pub fn gradients(store: &VarStore) -> Named {
    let all = variables(store).into_iter().map(|(name, variable)| (name, variable.grad()));
    all.filter(|(_, gradient)| gradient.defined()).collect()
}

/// What later steps do not change.
pub fn copies(named: &[(String, Tensor)]) -> Named {
    named.iter().map(|(name, value)| (name.clone(), value.detach().copy())).collect()
}

/// Gives all variables of a store these values.
pub fn set_values(store: &VarStore, values: &[(String, Tensor)]) {
    let mut variables = store.variables();
    assert_eq!(variables.len(), values.len(), "the same variables");
    tch::no_grad(|| {
        for (name, value) in values {
            variables.get_mut(name).expect("the same names").copy_(value);
        }
    });
}

/// Gives what is trained of a store numbers that are the same each time.
pub fn fill(store: &VarStore) {
    for (name, mut variable) in store.variables() {
        if variable.requires_grad() {
            tch::no_grad(|| variable.copy_(&numbers(&variable.size(), name.len() as i64)));
        }
    }
}

/// Leaves a store without gradients.
pub fn clear(store: &VarStore) {
    for (_, mut variable) in store.variables() {
        set_gradient(&mut variable, None).expect("cleared");
    }
}

/// An optimizer of one model, or of a pipeline's stages.
pub trait Update {
    /// A step, after which there are no gradients.
    fn update(&mut self);
}

impl Update for Optimizer {
    #[track_caller]
    fn update(&mut self) {
        self.step().expect("a step");
        self.zero_grad().expect("cleared");
    }
}

impl Update for PipelineOptimizer {
    #[track_caller]
    fn update(&mut self) {
        self.step().expect("a step");
        self.zero_grad().expect("cleared");
    }
}
