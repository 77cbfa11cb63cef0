//! Recording of the outside memory that work reads and writes, also through views, lists and inner operations.

use brimful_torch::touched::{Touched, any_is_left, touched};
use tch::{Device, Kind, Tensor};

const OPTIONS: (Kind, Device) = (Kind::Float, Device::Cpu);

/// Returns whether the list has the block that contains the tensor.
fn has(list: &[Tensor], tensor: &Tensor) -> bool {
    let start = tensor.data_ptr() as usize;
    list.iter().any(|block| {
        let first = block.data_ptr() as usize;
        (first..first + block.numel()).contains(&start)
    })
}

fn seen<T>(f: impl FnOnce() -> T) -> (T, Touched) {
    touched(f).expect("a list")
}

#[test]
fn reads_are_reported_from_writes() {
    let (x, mut counter) = (Tensor::ones([4], OPTIONS), Tensor::zeros([4], OPTIONS));
    let (sum, all) = seen(|| {
        let _ = counter.g_add_(&x);
        (&x * 2.0).sum(Kind::Float)
    });
    assert!(has(&all.read, &x) && !has(&all.written, &x));
    assert!(has(&all.written, &counter) && !has(&all.read, &counter));
    assert_eq!(sum.double_value(&[]), 8.0);
    // Memory that is gone was internal to the work.
    assert!(all.read.len() + all.written.len() <= 4, "{all:?}");
}

#[test]
fn what_was_frozen_is_seen_to_be_thawed_and_not_kept() {
    let [trained, frozen, unused] = [(); 3].map(|()| Tensor::ones([4], OPTIONS));
    let trained = trained.set_requires_grad(true);
    let other = Tensor::ones([4], OPTIONS);
    let (sum, all) = seen(|| (&trained * &frozen * &other).sum(Kind::Float));
    drop((sum, other));
    let _ = unused.set_requires_grad(true);
    assert!(!all.frozen.any_is_thawed());
    for thawed in [true, false, true] {
        let _ = frozen.set_requires_grad(thawed);
        assert_eq!(all.frozen.any_is_thawed(), thawed);
    }
    drop(frozen);
    assert!(!all.frozen.any_is_thawed(), "nobody has it any more");
}

#[test]
fn a_write_through_a_view_that_is_gone_is_the_blocks() {
    let table = Tensor::zeros([8, 2], OPTIONS);
    let ((), all) = seen(|| {
        let _ = table.narrow(0, 3, 2).fill_(1.0);
    });
    assert!(has(&all.written, &table));
    let block = all.written.iter().find(|block| block.data_ptr() == table.data_ptr());
    assert_eq!(block.expect("the whole block").numel(), 8 * 2 * 4);
}

#[test]
fn running_statistics_and_lists_are_written() {
    let x = Tensor::rand([6, 3], OPTIONS);
    let (mean, variance) = (Tensor::zeros([3], OPTIONS), Tensor::ones([3], OPTIONS));
    let several = [Tensor::ones([2], OPTIONS), Tensor::ones([5], OPTIONS)];
    let (_, all) = seen(|| {
        brimful_torch::foreach::scale(&several, 2.0).expect("scaled");
        let none = None::<&Tensor>;
        x.batch_norm(none, none, Some(&mean), Some(&variance), true, 0.1, 1e-5, false)
    });
    for tensor in [&mean, &variance, &several[0], &several[1]] {
        assert!(has(&all.written, tensor), "{tensor:?}");
    }
    assert!(has(&all.read, &x));
}

#[test]
fn lists_are_of_one_run_each_and_end_with_a_panic() {
    let (x, y) = (Tensor::ones([4], OPTIONS), Tensor::ones([4], OPTIONS));
    let panicked = std::panic::catch_unwind(|| seen(|| panic!("in the work")));
    assert!(panicked.is_err());
    let ((_, inner), outer) = seen(|| {
        let _ = &x + 1.0;
        seen(|| &y + 1.0)
    });
    assert!(has(&inner.read, &y) && !has(&inner.read, &x));
    assert!(has(&outer.read, &x) && !has(&outer.written, &x));
    let before = x.f_internal_version().expect("a version");
    let _ = &x + 1.0;
    assert_eq!(x.f_internal_version().expect("a version"), before);
}

#[test]
fn operations_are_the_same_for_other_tensors_and_others_for_another_number() {
    let x = || Tensor::rand([3, 2], OPTIONS);
    let work = |x: Tensor, factor: f64, p: f64| {
        let steps = Tensor::from(7_i64);
        (x * factor + steps).dropout(p, true).sum_dim_intlist(1, false, Kind::Float)
    };
    let lines = |factor, p| seen(|| work(x(), factor, p)).1.operations;
    let first = lines(0.1, 0.5);
    assert!(!first.is_empty());
    assert_eq!(first, lines(0.1, 0.5));
    for other in [lines(0.1 + 1e-15, 0.5), lines(0.1, 0.25)] {
        assert_eq!(other.len(), first.len());
        assert_ne!(other, first);
    }
    // A number in a host tensor counts as well.
    let count = |number: f64| seen(|| x() + Tensor::from(number)).1.operations;
    assert_ne!(count(1.5), count(2.5));
}

#[test]
fn what_is_untold_is_not_told() {
    let (x, y) = (Tensor::ones([4], OPTIONS), Tensor::ones([4], OPTIONS));
    let ((), all) = seen(|| {
        brimful_torch::touched::untold(|| drop(&y + 5.25));
        drop(&x + 1.0);
    });
    assert!(has(&all.read, &x) && !has(&all.read, &y));
    assert!(all.operations.iter().all(|line| !line.contains("5.25")), "{:?}", all.operations);
}

#[test]
fn a_block_that_is_left_is_known() {
    let (x, y) = (Tensor::ones([4], OPTIONS), Tensor::ones([4], OPTIONS));
    let (sum, all) = seen(|| &x + &y);
    assert!(has(&all.read, &x) && has(&all.read, &y));
    let view = x.narrow(0, 1, 2);
    drop(x);
    assert!(!any_is_left(&all.read));
    drop(view);
    assert!(any_is_left(&all.read));
    drop((y, sum));
}

#[test]
fn random_numbers_of_the_host_are_reported() {
    let ones = Tensor::ones([8], OPTIONS);
    assert!(seen(|| ones.dropout(0.5, true)).1.draws_on_host);
    assert!(seen(|| Tensor::rand([2], OPTIONS)).1.draws_on_host);
    let _own = brimful_torch::random::OwnGenerator::enter();
    assert!(seen(|| ones.dropout(0.5, true)).1.draws_on_host);
    assert!(!seen(|| ones.dropout(0.5, false).exp()).1.draws_on_host);
}
