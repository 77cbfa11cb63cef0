//! Foreach operations, compared with one tensor at a time.
//!
//! `BRIMFUL_TEST_DEVICE=cuda:0` runs the same tests on a GPU, and mixes both devices.

use crate::test_device::test_device;
use brimful_torch::autograd::set_gradient;
use brimful_torch::foreach;
use brimful_torch::gradients::{collect, offering};
use brimful_torch::memory_format::to_memory_format;
use tch::{Device, Kind, Tensor};

/// Returns tensors of several dtypes, shapes, memory formats and, with a GPU, devices.
fn mixed(salt: f64) -> Vec<Tensor> {
    let tensor = |shape: &[i64], kind, device| {
        let count = shape.iter().product::<i64>();
        let numbers = Tensor::arange(count, (Kind::Double, Device::Cpu)) * 0.7 + salt;
        numbers.sin().reshape(shape).to_kind(kind).to_device(device)
    };
    let device = test_device();
    vec![
        tensor(&[3, 4], Kind::Double, device),
        tensor(&[5], Kind::Float, device).set_requires_grad(true),
        tensor(&[], Kind::Float, device),
        tensor(&[4, 6], Kind::BFloat16, device),
        tensor(&[4, 6], Kind::Double, device).tr(),
        tensor(&[0, 2], Kind::Double, device),
        tensor(&[7], Kind::Half, Device::Cpu),
    ]
}

fn copies(tensors: &[Tensor]) -> Vec<Tensor> {
    tensors.iter().map(|tensor| tensor.detach().copy()).collect()
}

fn assert_close(found: &[Tensor], expected: &[Tensor]) {
    for (found, expected) in found.iter().zip(expected) {
        assert_eq!((found.size(), found.kind()), (expected.size(), expected.kind()));
        let bound = if expected.kind() == Kind::BFloat16 { 1e-2 } else { 1e-3 };
        assert!(found.detach().allclose(expected, bound, bound, false), "{found} {expected}");
    }
}

#[test]
fn lists_of_mixed_tensors_are_scaled_added_copied_and_zeroed() {
    let (into, what) = (mixed(0.0), mixed(1.0));
    let before = copies(&into);
    foreach::scale(&into, 3.0).expect("scaled");
    assert_close(&into, &before.iter().map(|t| t * 3.0).collect::<Vec<_>>());
    let factor = Tensor::from(0.5).to_device(test_device());
    foreach::scale_by(&into, &factor).expect("scaled");
    assert_close(&into, &before.iter().map(|t| t * 1.5).collect::<Vec<_>>());
    let before = copies(&into);
    foreach::add(&into, &what, -2.0).expect("added");
    let expected: Vec<_> = before.iter().zip(&what).map(|(a, b)| (a - b * 2.0).detach()).collect();
    assert_close(&into, &expected);
    foreach::copy(&into, &what).expect("copied");
    assert_close(&into, &copies(&what));
    foreach::zero(&into).expect("zeroed");
    assert!(into.iter().all(|t| t.abs().sum(Kind::Double).double_value(&[]) == 0.0));
    foreach::zero(&[]).expect("nothing to do");
}

#[test]
fn a_copy_crosses_kinds_memory_formats_and_devices() {
    let from = mixed(2.0);
    let zeros = |t: &Tensor| Tensor::zeros(t.size(), (Kind::Float, test_device()));
    let into: Vec<_> = from.iter().map(zeros).collect();
    foreach::copy(&into, &from).expect("copied");
    for (into, from) in into.iter().zip(&from) {
        let expected = from.to_kind(Kind::Float).to_device(test_device());
        assert!(into.allclose(&expected, 0.0, 0.0, false));
    }
}

#[test]
fn the_norm_is_that_of_one_long_vector() {
    let tensors = mixed(3.0);
    let flat = |t: &Tensor| t.detach().to_device(Device::Cpu).to_kind(Kind::Double).reshape([-1]);
    let long = Tensor::cat(&tensors.iter().map(flat).collect::<Vec<_>>(), 0);
    let norm = foreach::norm(&tensors).expect("a norm");
    assert_eq!((norm.dim(), norm.kind(), norm.device()), (0, Kind::Double, test_device()));
    assert!((norm.double_value(&[]) / long.norm().double_value(&[]) - 1.0).abs() < 1e-6);
    // 300² overflows f16, whose largest value is 65,504.
    let large = [Tensor::full([100], 300.0, (Kind::Half, test_device()))];
    assert_eq!(foreach::norm(&large).expect("a norm").double_value(&[]), 3000.0);
    assert!(foreach::norm(&[]).expect_err("no tensors").message.contains("norm of no tensors"));
}

#[test]
fn the_largest_number_is_finite_where_all_are() {
    let largest = |tensors: &[Tensor]| {
        let largest = foreach::largest(tensors).expect("a number");
        assert_eq!((largest.dim(), largest.device()), (0, test_device()));
        largest.double_value(&[])
    };
    let full = |kind, number: f64| Tensor::full([100], number, (kind, test_device()));
    // The squares overflow f32.
    let mut tensors = vec![full(Kind::Float, 2e38), full(Kind::Float, -3e38)];
    assert!((largest(&tensors) / 3e38 - 1.0).abs() < 1e-6);
    tensors.extend([full(Kind::Half, 6e4), Tensor::empty([0], (Kind::Float, test_device()))]);
    assert!((largest(&tensors) / 3e38 - 1.0).abs() < 1e-6);
    assert_eq!(largest(&tensors[3..]), 0.0);
    for (kind, number) in [(Kind::Half, f64::NAN), (Kind::Double, f64::NEG_INFINITY)] {
        let odd = full(Kind::Float, 1.0).to_kind(kind);
        let _ = odd.narrow(0, 57, 1).fill_(number);
        let with_odd: Vec<_> = tensors.iter().chain([&odd]).map(Tensor::shallow_clone).collect();
        assert!(!largest(&with_odd).is_finite(), "{number}");
    }
}

/// More tensors than one launch takes, of odd lengths, some in another memory format than their sums.
#[test]
fn halves_are_added_to_sums_in_f32() {
    let shapes =
        [vec![1], vec![7], vec![8], vec![2049], vec![3, 5, 4, 6], vec![64, 33], vec![0, 2]];
    for kind in [Kind::BFloat16, Kind::Half] {
        let numbers = |i: usize, salt: f64| {
            let shape = &shapes[i % shapes.len()];
            let count = shape.iter().product::<i64>();
            let all =
                (Tensor::arange(count, (Kind::Double, Device::Cpu)) * 0.37 + salt + i as f64).sin();
            all.reshape(&shape[..]).to_kind(kind).to_device(test_device())
        };
        let mut parameters: Vec<Tensor> =
            (0..230).map(|i| numbers(i, 0.0).set_requires_grad(true)).collect();
        let mut sums: Vec<Option<Tensor>> = parameters.iter().map(|_| None).collect();
        for round in 0..3 {
            for (i, parameter) in parameters.iter_mut().enumerate() {
                let gradient = numbers(i, f64::from(round));
                // In the last round, gradients with four dimensions are channels last.
                let gradient = match gradient.dim() {
                    4 if round == 2 => to_memory_format(&gradient, true).expect("memory"),
                    _ => gradient,
                };
                assert_eq!(gradient.is_contiguous(), gradient.dim() != 4 || round != 2);
                set_gradient(parameter, Some(&gradient)).expect("a gradient");
            }
            collect(&parameters, &mut sums).expect("summed");
        }
        for (i, sum) in sums.iter().enumerate() {
            let sum = sum.as_ref().expect("a sum");
            let exact = |round: i32| numbers(i, f64::from(round)).to_kind(Kind::Float);
            assert_eq!(*sum, exact(0) + exact(1) + exact(2), "{kind:?}, tensor {i}");
        }
    }
}

#[test]
fn sums_are_offered_for_one_backward_alone() {
    let parameter = ones(&[3], Kind::Float).set_requires_grad(true);
    let (parameters, mut sums) = ([parameter], [None]);
    let twice = || {
        (&parameters[0] * 2.0).sum(Kind::Float).backward();
        Ok(())
    };
    offering(&parameters, &mut sums, twice).expect("a backward");
    assert!(sums[0].is_none(), "libtorch's own nodes know of no sums");
    collect(&parameters, &mut sums).expect("summed");
    assert_eq!(sums[0], Some(ones(&[3], Kind::Float) * 2.0));
    let refused = offering(&parameters, &mut [], || Ok(()));
    assert!(refused.expect_err("lengths").message.contains("1 and 0"));
}

#[test]
fn lists_that_do_not_match_are_refused() {
    let (one, two) = (&mixed(0.0)[..1], &mixed(0.0)[..2]);
    assert!(foreach::add(one, two, 1.0).expect_err("lengths").message.contains("1, 2"));
    assert!(foreach::copy(two, one).expect_err("lengths").message.contains("2, 1"));
    let vector = Tensor::ones([2], (Kind::Float, test_device()));
    assert!(foreach::scale_by(one, &vector).expect_err("a vector").message.contains("0-dim"));
}

fn ones(shape: &[i64], kind: Kind) -> Tensor {
    Tensor::ones(shape, (kind, test_device()))
}
