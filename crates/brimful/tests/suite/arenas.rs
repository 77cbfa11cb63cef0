//! Arenas count exactly, limit exactly, and never mix.

use std::sync::mpsc;
use std::thread;

use brimful::internal::{self, Caught};
use brimful::memory::Arena;
use brimful::{Bytes, Error};
use brimful_torch::autograd;
use proptest::prelude::*;
use tch::{Device, Kind, TchError, Tensor};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

#[test]
fn past_the_limit_an_allocation_fails_with_the_numbers_and_nothing_is_kept() {
    let arena = Arena::limited("small", 10_000).expect("a limit");
    let _inside = arena.enter();
    let kept = Tensor::zeros([1000], CPU);
    let Err(Caught::OutOfMemory(oom)) = internal::catch(|| Tensor::f_zeros([2000], CPU)) else {
        panic!("8,000 more bytes do not fit")
    };
    assert_eq!(oom.arena(), Some("small"));
    assert_eq!((oom.asked, oom.in_use), (Some(Bytes(8000)), Some(Bytes(4000))));
    assert_eq!(oom.limit, Some(Bytes(10_000)));
    assert_eq!((arena.current(), arena.peak()), (4000, 4000));
    // Allocations that fit still succeed, up to the last byte.
    let last = Tensor::zeros([1500], CPU);
    assert_eq!(arena.current(), 10_000);
    drop((kept, last));
    assert_eq!((arena.current(), arena.peak()), (0, 10_000));
}

#[test]
fn another_failure_of_libtorch_keeps_its_own_message() {
    let result =
        internal::catch(|| Tensor::zeros([2, 3], CPU).f_matmul(&Tensor::zeros([2, 3], CPU)));
    let Err(Caught::Error(TchError::Torch(message))) = result else { panic!("shapes differ") };
    assert!(message.starts_with("mat1 and mat2 shapes cannot be multiplied"), "{message}");
}

#[test]
fn limits_that_make_no_sense_are_refused_and_the_old_one_stays() {
    let zero = Arena::limited("none", 0).expect_err("a limit of 0");
    assert_eq!(zero, Error::LimitOfZero { memory: "none".into() });
    let arena = Arena::limited("full", 8000).expect("a limit");
    let inside = arena.enter();
    let kept = Tensor::zeros([1000], CPU);
    let error = arena.set_limit(Some(3000)).expect_err("below use").to_string();
    assert!(error.contains("limited to 2.93 KiB: 3.91 KiB are in use"), "{error}");
    assert_eq!(arena.limit(), Some(8000));
    arena.set_limit(Some(4000)).expect("what is in use is enough");
    arena.set_limit(None).expect("no limit");
    let large = Tensor::zeros([100_000], CPU);
    assert_eq!(arena.current(), 404_000);
    drop((kept, large, inside));
}

#[test]
fn arenas_nest_and_leave_as_they_were_entered() {
    let (outer, inner) = (Arena::new("outer"), Arena::new("inner"));
    let in_outer = outer.enter();
    let in_inner = inner.enter();
    let a = Tensor::zeros([10], CPU);
    drop(in_inner);
    let b = Tensor::zeros([20], CPU);
    drop(in_outer);
    let c = Tensor::zeros([40], CPU);
    assert_eq!((outer.current(), inner.current()), (80, 40));
    drop((a, b, c));
    assert_eq!((outer.current(), inner.current()), (0, 0));
}

#[test]
fn guards_dropped_out_of_order_leave_the_innermost_that_is_left() {
    let (outer, inner) = (Arena::new("outer"), Arena::new("inner"));
    let in_outer = outer.enter();
    let in_inner = inner.enter();
    drop(in_outer);
    let a = Tensor::zeros([10], CPU);
    assert_eq!((outer.current(), inner.current()), (0, 40), "the inner guard is still there");
    // The arena of the guard that was dropped first is left together with the other one.
    drop(outer);
    drop(in_inner);
    let b = Tensor::zeros([20], CPU);
    assert_eq!(inner.current(), 40, "no guard is left");
    drop((a, b));
    assert_eq!((inner.current(), inner.allocations()), (0, 1));
}

#[test]
fn a_guard_keeps_its_arena_until_its_turn_to_be_the_innermost() {
    let (outer, inner) = (Arena::new("outer"), Arena::new("inner"));
    let watched = outer.clone();
    let again = inner.enter();
    let in_outer = outer.enter();
    let in_inner = inner.enter();
    drop((outer, again));
    drop(in_inner);
    let a = Tensor::zeros([10], CPU);
    assert_eq!((watched.current(), inner.current()), (40, 0));
    drop((in_outer, a));
    assert_eq!((watched.current(), inner.allocations()), (0, 0));
}

#[test]
fn blocks_outlive_their_arena() {
    let arena = Arena::new("gone");
    let tensor = {
        let _inside = arena.enter();
        Tensor::ones([1000], CPU)
    };
    drop(arena);
    assert_eq!(tensor.sum(Kind::Float).double_value(&[]), 1000.0);
}

#[test]
fn two_threads_in_two_arenas_never_mix_wherever_a_tensor_is_freed() {
    let (left, right) = (&Arena::new("left"), &Arena::new("right"));
    let (to_right, from_left) = mpsc::channel();
    let (to_left, from_right) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || {
            let _inside = left.enter();
            for i in 1..=200 {
                to_right.send(Tensor::zeros([i], CPU)).expect("right listens");
                drop::<Tensor>(from_right.recv().expect("right sends"));
            }
        });
        scope.spawn(move || {
            let _inside = right.enter();
            for tensor in from_left {
                let answer = Tensor::zeros([tensor.size1().expect("one") * 2], CPU);
                to_left.send(answer).expect("left listens");
            }
        });
    });
    assert_eq!((left.current(), right.current()), (0, 0));
    assert_eq!((left.allocations(), right.allocations()), (200, 200));
    assert!(left.peak() <= 2 * 800 && right.peak() <= 2 * 1600);
}

/// Holds x (64 × 32), w (32 × 16), y = x·w, the gradient given for y, and the gradient of w.
#[test]
fn the_peak_of_a_known_graph_is_the_one_computed_by_hand() {
    let arena = Arena::new("graph");
    {
        let _inside = arena.enter();
        let double = (Kind::Double, Device::Cpu);
        let x = Tensor::ones([64, 32], double);
        let w = Tensor::ones([32, 16], double).set_requires_grad(true);
        let g = Tensor::ones([64, 16], double);
        autograd::backward(&[&x.mm(&w)], &[Some(&g)], false).expect("backward");
        assert_eq!(w.grad().size(), [32, 16]);
        let by_hand = 8 * (64 * 32 + 32 * 16 + 64 * 16 + 64 * 16 + 32 * 16);
        assert_eq!(arena.peak(), by_hand);
        arena.reset_peak();
        assert_eq!(arena.peak(), by_hand - 8 * 64 * 16, "y is gone");
    }
    assert_eq!(arena.current(), 0);
}

/// Runs one step of a small network; the weights exist before, everything else is made here.
fn training_step(weights: &[Tensor]) -> Result<f64, TchError> {
    let x = Tensor::f_ones([8, 16], CPU)?;
    let hidden = x.f_matmul(&weights[0])?.f_relu()?;
    let loss = hidden.f_matmul(&weights[1])?.f_square()?.f_mean(Kind::Float)?;
    loss.f_backward()?;
    loss.f_double_value(&[])
}

#[test]
fn every_single_allocation_of_a_training_step_may_fail() {
    let arena = Arena::new("faulty");
    let _inside = arena.enter();
    let mut weights =
        [[16, 32], [32, 4]].map(|shape| Tensor::ones(shape, CPU).set_requires_grad(true));
    let before = arena.current();
    let forget = |weights: &mut [Tensor; 2]| {
        for weight in weights {
            autograd::set_gradient(weight, None).expect("no gradient");
        }
    };

    let counted = arena.allocations();
    let expected = training_step(&weights).expect("no fault");
    let allocations = arena.allocations() - counted;
    assert!(allocations > 8, "{allocations}");

    for n in 1..=allocations {
        forget(&mut weights);
        assert_eq!(arena.current(), before);
        arena.fail_nth_allocation(n);
        let result = internal::catch(|| training_step(&weights));
        let Err(Caught::OutOfMemory(oom)) = result else { panic!("allocation {n} did not fail") };
        assert_eq!(oom.arena(), Some("faulty"));
        assert_eq!(oom.limit, None);
        forget(&mut weights);
        assert_eq!(arena.current(), before, "after allocation {n} failed");
        assert_eq!(training_step(&weights).expect("it fails once"), expected);
    }
    arena.fail_nth_allocation(1);
    arena.fail_nth_allocation(0);
    training_step(&weights).expect("the fault was called off");
}

/// Next operation of a thread: allocate this many floats, free one of its tensors, or pass one on.
#[derive(Debug, Clone)]
enum Deed {
    Allocate(i64),
    Free(usize),
    PassOn(usize),
}

fn deed() -> impl Strategy<Value = Deed> {
    prop_oneof![
        3 => (0_i64..2000).prop_map(Deed::Allocate),
        2 => any::<usize>().prop_map(Deed::Free),
        1 => any::<usize>().prop_map(Deed::PassOn),
    ]
}

/// Runs the operations of each thread, in the arena given by its number modulo the number of arenas.
fn perform(deeds: &[Vec<Deed>], arenas: &[Arena]) {
    let (senders, receivers): (Vec<_>, Vec<_>) = deeds.iter().map(|_| mpsc::channel()).unzip();
    thread::scope(|scope| {
        for (i, (deeds, received)) in deeds.iter().zip(receivers).enumerate() {
            let next = senders[(i + 1) % senders.len()].clone();
            let arena = &arenas[i % arenas.len()];
            scope.spawn(move || {
                let _inside = arena.enter();
                let mut mine: Vec<Tensor> = Vec::new();
                for deed in deeds {
                    match *deed {
                        Deed::Allocate(n) => mine.extend(Tensor::f_empty([n], CPU)),
                        Deed::Free(k) if !mine.is_empty() => drop(mine.swap_remove(k % mine.len())),
                        Deed::PassOn(k) if !mine.is_empty() => {
                            let passed = mine.swap_remove(k % mine.len());
                            let _ = next.send(passed);
                        }
                        _ => {}
                    }
                    mine.extend(received.try_iter());
                }
            });
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn random_deeds_of_eight_threads_balance(
        deeds in prop::collection::vec(prop::collection::vec(deed(), 0..24), 8),
        limit in prop::option::of(1_u64..100_000),
    ) {
        let arenas = ["a", "b", "c"].map(Arena::new);
        for arena in &arenas {
            arena.set_limit(limit)?;
        }
        perform(&deeds, &arenas);
        for arena in &arenas {
            prop_assert_eq!(arena.current(), 0);
            prop_assert!(limit.is_none_or(|limit| arena.peak() <= limit));
        }
    }
}
