//! Ranks under a real `mpirun`: exchanged values, and errors.

use crate::support::ranks::in_ranks;
use crate::support::test_device;
use brimful::World;
use brimful::world::WorldError;
use tch::{Device, Kind, Tensor};

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);

#[test]
fn a_process_without_a_launcher_is_a_world_of_one() {
    let world = World::alone();
    assert_eq!((world.rank(), world.size(), world.hosts().len()), (0, 1, 1));
    assert_eq!(world.share("a number", &7).expect("shared"), [7]);
    let tensor = Tensor::ones([3], DOUBLE);
    world.sum(&[tensor.shallow_clone()]).expect("a sum");
    world.broadcast(&[tensor.shallow_clone()], 0).expect("a broadcast");
    assert_eq!(tensor, Tensor::ones([3], DOUBLE));
    let error = world.broadcast(&[tensor], 3).expect_err("there is no such rank");
    assert_eq!(error, WorldError::NoRank { rank: 3, size: 1 }.into());
}

#[test]
fn every_rank_is_told_what_each_has_to_say() {
    in_ranks(3, |world| {
        assert_eq!((world.size(), world.rank_on_host()), (3, world.rank()));
        for round in 0..100 {
            let reported = world.share("a sum", &(world.rank() * round)).expect("shared");
            assert_eq!(reported, [0, round, 2 * round]);
        }
        let not_a_number = world.share("a float", &f64::NAN).expect("shared");
        assert!(not_a_number.iter().all(|value| value.is_nan()));
    });
}

/// Returns a rank's tensor before the sum.
fn of_rank(rank: usize, shape: &[i64], kind: Kind) -> Tensor {
    let length: i64 = shape.iter().product();
    let row = Tensor::arange(length, (Kind::Double, Device::Cpu)) * (rank as f64 + 1.0);
    row.view(shape).to_kind(kind).to_device(test_device())
}

#[test]
fn sums_broadcasts_and_gathers_of_tensors() {
    in_ranks(4, |world| {
        // From no elements, over fewer than ranks, to more than fit into one message.
        let shapes: [&[i64]; 5] = [&[0], &[3], &[5, 7], &[1 << 20], &[]];
        for kind in [Kind::Double, Kind::Float, Kind::Int64] {
            let tensors: Vec<_> = shapes.iter().map(|s| of_rank(world.rank(), s, kind)).collect();
            world.sum(&tensors).expect("a sum");
            for (tensor, shape) in tensors.iter().zip(shapes) {
                assert_eq!(*tensor, of_rank(0, shape, kind) * 10, "{shape:?} {kind:?}");
            }
            // Not contiguous, so that it is not sent from the tensor's own memory.
            let strided = of_rank(world.rank(), &[5, 7], kind).tr();
            world.broadcast(&[strided.shallow_clone()], 2).expect("a broadcast");
            assert_eq!(strided, of_rank(2, &[5, 7], kind).tr());
        }
        let own =
            vec![(format!("of {}", world.rank()), of_rank(world.rank(), &[2, 2], Kind::Half))];
        let all = world.gather(own).expect("gathered");
        assert_eq!(all.len(), if world.rank() == 0 { 4 } else { 1 });
        for (place, (name, tensor)) in all.iter().enumerate() {
            let rank = if world.rank() == 0 { place } else { world.rank() };
            assert_eq!(name, &format!("of {rank}"));
            assert_eq!(tensor.to_device(test_device()), of_rank(rank, &[2, 2], Kind::Half));
        }
    });
}

#[test]
fn ranks_with_different_values_are_all_reported_who_has_what() {
    in_ranks(3, |world| {
        let batch = if world.rank() == 1 { 32 } else { 64 };
        let error = world.agree("the batch size", &batch).expect_err("they differ");
        let words = "the batch size must be the same on all ranks, but is 64 on ranks 0, 2 and 32 on rank 1";
        assert_eq!(error.to_string(), words);
        world.agree("the batch size", &64).expect("now they agree");
    });
}

#[test]
fn tensors_that_do_not_fit_together_are_refused_on_all_ranks() {
    in_ranks(3, |world| {
        let rank = world.rank() as i64;
        for (own, words) in [
            (vec![Tensor::ones([4 + rank / 2], DOUBLE)], "Double [4] on ranks 0, 1 and Double [5]"),
            (vec![Tensor::ones([1 + rank], DOUBLE)], "Double [1] on rank 0 and Double [2]"),
            (
                (0..=rank).map(|_| Tensor::ones([2], DOUBLE)).collect(),
                "Double [2], Double [2] on rank 1",
            ),
            (
                vec![Tensor::ones(
                    [2],
                    (if rank == 1 { Kind::Float } else { Kind::Double }, Device::Cpu),
                )],
                "Float [2] on rank 1",
            ),
        ] {
            let before: Vec<Tensor> = own.iter().map(Tensor::copy).collect();
            for error in [world.sum(&own), world.broadcast(&own, 0)] {
                let error = error.expect_err("they differ").to_string();
                assert!(error.contains("must be the same on all ranks"), "{error}");
                assert!(error.contains(words), "{error}");
                assert_eq!(own, before);
            }
        }
        let own = vec![Tensor::ones([2], DOUBLE)];
        world.sum(&own).expect("a sum");
        assert_eq!(own, [Tensor::ones([2], DOUBLE) * 3]);
    });
}

#[test]
fn ranks_that_make_different_calls_are_reported_so() {
    in_ranks(2, |world| {
        let what = ["save", "step"][world.rank()];
        let error = world.share(what, &0).expect_err("out of step");
        let WorldError::OutOfStep { rank, theirs, .. } = world_error(error) else {
            panic!("another")
        };
        assert_eq!((rank, theirs.as_str()), (1 - world.rank(), ["step", "save"][world.rank()]));
    });
}

#[test]
fn who_waits_for_a_rank_that_has_ended_is_told_so() {
    in_ranks(3, |world| {
        if world.rank() == 2 {
            return;
        }
        let error = world_error(world.share("a number", &1).expect_err("one has ended"));
        assert!(matches!(error, WorldError::RankLeft { rank: 2, words: None, .. }), "{error:?}");
    });
}

fn world_error(error: brimful::Error) -> WorldError {
    match error {
        brimful::Error::World(error) => error,
        other => panic!("{other}"),
    }
}
