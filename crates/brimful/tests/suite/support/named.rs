//! Variables by name: lists, copies, assigned values, and cleared gradients.

use brimful::optim::Optimizer;
use brimful_torch::autograd::set_gradient;
use tch::Tensor;
use tch::nn::VarStore;

use super::numbers;

/// Tensors with their names, in order.
pub type Named = Vec<(String, Tensor)>;

/// Returns all variables of a store.
pub fn variables(store: &VarStore) -> Named {
    let mut all: Named = store.variables().into_iter().collect();
    all.sort_by(|(a, _), (b, _)| a.cmp(b));
    all
}

/// Returns the gradients that exist.
pub fn gradients(store: &VarStore) -> Named {
    let all = variables(store).into_iter().map(|(name, variable)| (name, variable.grad()));
    all.filter(|(_, gradient)| gradient.defined()).collect()
}

/// Returns copies that later steps do not change.
pub fn copies(named: &[(String, Tensor)]) -> Named {
    named.iter().map(|(name, value)| (name.clone(), value.detach().copy())).collect()
}

/// Sets all variables of a store to these values.
pub fn set_values(store: &VarStore, values: &[(String, Tensor)]) {
    let mut variables = store.variables();
    assert_eq!(variables.len(), values.len(), "the same variables");
    tch::no_grad(|| {
        for (name, value) in values {
            variables.get_mut(name).expect("the same names").copy_(value);
        }
    });
}

/// Sets the trained variables of a store to fixed values.
pub fn fill(store: &VarStore) {
    for (name, mut variable) in store.variables() {
        if variable.requires_grad() {
            tch::no_grad(|| variable.copy_(&numbers(&variable.size(), name.len() as i64)));
        }
    }
}

/// Removes all gradients of a store.
pub fn clear(store: &VarStore) {
    for (_, mut variable) in store.variables() {
        set_gradient(&mut variable, None).expect("cleared");
    }
}

/// A step of training: the optimizer's step, and cleared gradients.
pub trait Update {
    fn update(&mut self);
}

impl Update for Optimizer {
    #[track_caller]
    fn update(&mut self) {
        self.step().expect("a step");
        self.zero_grad().expect("cleared");
    }
}
