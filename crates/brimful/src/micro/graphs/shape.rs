//! Properties in which two micro-batches must agree for one CUDA graph to replay both.

use std::any::{TypeId, type_name};

use tch::{Kind, Tensor};

use crate::batch::{self, Batch, Leaf};

/// Identity of the closure that runs on a micro-batch, known by its type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Closure {
    id: TypeId,
    name: &'static str,
}

impl Closure {
    pub(crate) fn of_type<F>() -> Self {
        Self { id: typeid::of::<F>(), name: type_name::<F>() }
    }

    /// Returns whether its type identifies its work. One type of trait objects or function pointers stands for
    /// many closures, and so does a closure of a function that is generic over such a type.
    pub(super) fn is_distinct(self) -> bool {
        !["dyn ", "fn("].iter().any(|word| self.name.contains(word))
    }
}

/// True for a tensor that requires a gradient. A CUDA graph computes no gradients of its inputs.
type WantsGradient = bool;

/// Shape of a micro-batch, with the closure that runs on it.
#[derive(Debug, PartialEq)]
pub(super) struct Shape {
    pub(super) closure: Closure,
    /// True if its mini-batch is a whole step, which decides on the divisors of its terms.
    single: bool,
    /// All values that are not tensors.
    outline: Vec<String>,
    leaves: Vec<(Vec<i64>, Kind, WantsGradient)>,
}

impl Shape {
    pub(super) fn of(micro_batch: &impl Batch, closure: Closure, single: bool) -> Self {
        let mut outline = Vec::new();
        micro_batch.outline(&mut |line| outline.push(line.to_string()));
        let leaves = batch::leaves(micro_batch).into_iter().map(Leaf::tensor);
        let leaf = |tensor: &Tensor| (tensor.size(), tensor.kind(), tensor.requires_grad());
        let leaves = leaves.map(leaf).collect();
        Self { closure, single, outline, leaves }
    }
}

#[cfg(test)]
mod tests {
    use super::Closure;

    fn of<F>(_: &F) -> Closure {
        Closure::of_type::<F>()
    }

    fn one(x: f64) -> f64 {
        x
    }

    fn two(x: f64) -> f64 {
        x * 2.0
    }

    fn wrapped<F: Fn(f64) -> f64>(f: F) -> Closure {
        of(&|x| f(x))
    }

    #[test]
    fn closures_and_functions_are_reported_apart_by_their_types() {
        let factor = 3.0;
        let all = [
            of(&one),
            of(&two),
            of(&|x: f64| x * factor),
            of(&|x: f64| x * factor),
            wrapped(one),
            wrapped(two),
            wrapped(|x| x * factor),
        ];
        for (i, a) in all.iter().enumerate() {
            assert!(a.is_distinct(), "{a:?}");
            assert!(all.iter().skip(i + 1).all(|b| a != b), "{a:?}");
        }
        let mut same = |x: f64| x * factor;
        assert_eq!(of(&same), of(&same));
        assert!(of(&&mut same).is_distinct());
    }

    #[test]
    fn what_stands_for_many_closures_is_not_distinct() {
        let mut boxed: Box<dyn FnMut(f64) -> f64> = Box::new(one);
        let pointer: fn(f64) -> f64 = two;
        let generic: Box<dyn Fn(f64) -> f64> = Box::new(two);
        let shared: &dyn Fn(f64) -> f64 = &one;
        let all = [
            of(&boxed),
            of(&&mut boxed),
            of(&&mut *boxed),
            of(&pointer),
            of(&&pointer),
            of(&shared),
            wrapped(generic),
            wrapped(pointer),
        ];
        for closure in all {
            assert!(!closure.is_distinct(), "{closure:?}");
        }
    }
}
