//! A backward, whole or split, that would reach an unknown leaf returns that leaf and runs nothing, with and
//! without libtorch's engine.
//!
//! `BRIMFUL_TEST_DEVICE=cuda:0` runs the same tests on a GPU; then use `--test-threads=1`.

use crate::test_device::test_device;
use brimful_torch::autograd::{backward_to, by_engine, is_same};
use brimful_torch::leaves::{KnownLeaves, Reach, other_leaf};
use brimful_torch::split_backward::SplitBackward;
use tch::{Kind, Tensor};

/// Input, known weight and unknown weight.
struct Case {
    x: Tensor,
    known: Tensor,
    other: Tensor,
    leaves: KnownLeaves,
}

impl Case {
    fn new() -> Self {
        let leaf = |at: f64| {
            let ones = Tensor::ones([3], (Kind::Double, test_device()));
            (ones * at).set_requires_grad(true)
        };
        let (x, known, other) = (leaf(2.0), leaf(3.0), leaf(5.0));
        let leaves = KnownLeaves::new([&known]).expect("a list");
        Self { x, known, other, leaves }
    }

    fn out(&self) -> Tensor {
        (&self.x * &self.known).sin() * &self.other
    }

    fn gradients(&self) -> [Tensor; 3] {
        [&self.x, &self.known, &self.other].map(Tensor::grad)
    }

    /// Runs a whole backward; returns an unknown leaf, if it found one.
    fn whole(&self) -> Option<Tensor> {
        let out = self.out();
        let reach =
            backward_to(&self.leaves, &[&self.x], &[&out], &[Some(&out.ones_like())], false);
        match reach.expect("a backward") {
            Reach::Known(()) => None,
            Reach::Other(leaf) => Some(leaf),
        }
    }

    /// Runs a split backward to these inputs; returns an unknown leaf, if it found one.
    fn split_backward(&self, inputs: &[Tensor]) -> Option<Tensor> {
        let out = self.out();
        let groups = [vec![(out.shallow_clone(), out.ones_like())]];
        match SplitBackward::input_gradients_to(&self.leaves, &groups, inputs).expect("a half") {
            Reach::Other(leaf) => Some(leaf),
            Reach::Known((_, mut weights)) => {
                weights.add_weight_gradients(0).expect("a half");
                None
            }
        }
    }

    #[track_caller]
    fn check_found(&self, found: Option<Tensor>, expected: &Tensor) {
        assert!(is_same(&found.expect("a leaf"), expected));
        assert!(self.gradients().iter().all(|gradient| !gradient.defined()), "nothing was run");
    }

    #[track_caller]
    fn check_ran(&self) {
        let [_, known, other] = self.gradients();
        let close =
            |found: &Tensor, expected: f64| (found.double_value(&[0]) - expected).abs() < 1e-10;
        assert!(close(&known, 2.0 * f64::cos(6.0) * 5.0), "{known}");
        assert!(close(&other, f64::sin(6.0)), "{other}");
    }
}

fn by_both(check: fn()) {
    check();
    by_engine(check);
}

#[test]
fn a_whole_backward_gives_the_other_leaf_and_runs_when_it_is_known() {
    by_both(|| {
        let mut case = Case::new();
        case.check_found(case.whole(), &case.other);
        case.leaves.add([&case.other]).expect("a longer list");
        assert!(case.whole().is_none());
        case.check_ran();
    });
}

#[test]
fn halves_give_it_too_with_an_input_and_without() {
    by_both(|| {
        for has_input in [true, false] {
            let mut case = Case::new();
            let inputs: Vec<Tensor> =
                has_input.then(|| case.x.shallow_clone()).into_iter().collect();
            if !has_input {
                case.leaves.add([&case.x]).expect("a longer list");
            }
            case.check_found(case.split_backward(&inputs), &case.other);
            case.leaves.add([&case.other]).expect("a longer list");
            assert!(case.split_backward(&inputs).is_none());
            case.check_ran();
        }
    });
}

#[test]
fn an_input_that_nobody_has_named_is_another_leaf() {
    by_both(|| {
        let mut case = Case::new();
        case.leaves.add([&case.other]).expect("a longer list");
        case.check_found(case.split_backward(&[]), &case.x);
        let out = case.out();
        let found = other_leaf([&out], &case.leaves).expect("a look");
        case.check_found(found, &case.x);
    });
}

#[test]
fn one_that_was_frozen_since_the_forward_gets_nothing_and_is_let_be() {
    let case = Case::new();
    let out = case.out();
    let _frozen = case.other.set_requires_grad(false);
    let roots = [&out];
    let ones = out.ones_like();
    let reach = backward_to(&case.leaves, &[&case.x], &roots, &[Some(&ones)], false);
    assert!(matches!(reach.expect("a backward"), Reach::Known(())));
    assert!(!case.other.grad().defined() && case.known.grad().defined());
}

#[test]
fn a_root_that_is_a_leaf_itself_is_looked_at() {
    let case = Case::new();
    let ones = case.other.ones_like();
    let run = |leaves: &KnownLeaves| {
        backward_to(leaves, &[], &[&case.other], &[Some(&ones)], false).expect("a backward")
    };
    assert!(matches!(run(&case.leaves), Reach::Other(leaf) if is_same(&leaf, &case.other)));
    assert!(!case.other.grad().defined());
    let all = KnownLeaves::new([&case.other]).expect("a list");
    assert!(matches!(run(&all), Reach::Known(())));
    assert_eq!(case.other.grad(), ones);
}
