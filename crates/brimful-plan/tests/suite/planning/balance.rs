//! Tests of the balancer against brute force, and against inputs that broke other balancers.

use brimful_plan::balance::{self, Balance, BalanceError, Load, Slot};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

fn loads(times: &[f64]) -> Vec<Load> {
    times.iter().map(|&time| Load { time, output_bytes: 1, ..Load::default() }).collect()
}

fn sizes(times: &[f64], stages: usize) -> Vec<usize> {
    balance::by_time(&loads(times), &vec![Slot::default(); stages]).unwrap().sizes().to_vec()
}

#[test]
fn layers_are_spread_and_no_stage_is_empty() {
    assert_eq!(sizes(&[1.0; 7], 4), [1, 2, 2, 2]);
    assert_eq!(sizes(&[0.1; 7], 4), [1, 2, 2, 2]);
    assert_eq!(sizes(&[1.0; 12], 8), [1, 1, 1, 1, 2, 2, 2, 2]);
    assert_eq!(sizes(&[1.0; 15], 8), [1, 2, 2, 2, 2, 2, 2, 2]);
    assert_eq!(sizes(&[1.0; 16], 8), [2; 8]);
    assert_eq!(sizes(&[1.0, 1.0, 10.0, 10.0], 3), [2, 1, 1]);
    assert_eq!(sizes(&[0.0; 5], 5), [1; 5]);
    assert_eq!(sizes(&[5.0, 0.0, 0.0], 3), [1; 3]);
    let one_is_large = [&[1.0; 12][..], &[10.0]].concat();
    assert_eq!(sizes(&one_is_large, 4), [4, 4, 4, 1]);
    // This input makes torchgpipe's balancer run for ever.
    let times = [1.0, 1.0, 10.0, 10.0, 1.0, 1.0, 1.0, 10.0, 1.0, 10.0, 1.0];
    assert_eq!(sizes(&times, 8), [2, 1, 1, 3, 1, 1, 1, 1]);
}

#[test]
fn errors_carry_the_numbers() {
    let message = |result: Result<Balance, BalanceError>| result.unwrap_err().to_string();
    assert_eq!(
        message(Balance::new([3, 4], 8)),
        "balance [3, 4] sums to 7, but the model has 8 layers"
    );
    assert_eq!(
        message(Balance::new([8, 0], 8)),
        "stage 1 of balance [8, 0] is empty: give it a layer, or use one stage fewer"
    );
    assert_eq!(
        message(balance::by_time(&loads(&[1.0; 3]), &[Slot::default(); 4])),
        "4 stages need at least 4 layers, but the model has 3: use at most 3 stages, or cut the layers finer"
    );
    assert_eq!(
        message(balance::by_time(&loads(&[1.0, f64::NAN]), &[Slot::default()])),
        "the whole time of layer 1 is NaN: it must be finite and not negative"
    );
    let fat = [Load { bytes: 3 << 30, ..Load::default() }; 4];
    let slots = [Slot { memory: Some(4 << 30), ..Slot::default() }; 2];
    assert_eq!(
        message(balance::by_time_within(&fat, &slots)),
        "no cut into 2 stages fits: the layers need 12.0 GiB in all, and the largest layer 3.00 GiB; the devices have \
         8.00 GiB in all, and the largest device 4.00 GiB; use more devices, smaller micro-batches or activation \
         recomputation"
    );
    assert!(matches!(Balance::new([], 0), Err(BalanceError::NoStages)));
    assert!(matches!(balance::by_bytes(&fat, &[]), Err(BalanceError::NoStages)));
    let stopped = [Slot { speed: 0.0, ..Slot::default() }];
    assert!(matches!(balance::by_time(&fat, &stopped), Err(BalanceError::BadSpeed { .. })));
}

/// Value of a balance: the worst stage first, the bytes sent second.
#[derive(Debug, PartialEq)]
struct Worth {
    worst: f64,
    sent: u64,
}

#[derive(Debug, Clone, Copy)]
enum Goal {
    Time,
    TimeWithin,
    Bytes,
}

fn stage_bytes(layers: &[Load], slot: &Slot) -> u64 {
    layers.iter().map(|layer| layer.bytes + slot.held * layer.activation_bytes).sum()
}

fn worth(sizes: &[usize], layers: &[Load], slots: &[Slot], goal: Goal) -> Option<Worth> {
    let shares = slots.iter().all(|slot| slot.memory.is_some());
    let (mut start, mut worst, mut sent) = (0, 0.0, 0);
    for (size, slot) in sizes.iter().zip(slots) {
        let mine = &layers[start..start + size];
        start += size;
        let bytes = stage_bytes(mine, slot);
        if matches!(goal, Goal::TimeWithin) && slot.memory.is_some_and(|memory| bytes > memory) {
            return None;
        }
        let cost = match goal {
            Goal::Bytes if shares => bytes as f64 / slot.memory.unwrap() as f64,
            Goal::Bytes => bytes as f64,
            _ => mine.iter().map(|layer| layer.time).sum::<f64>() / slot.speed,
        };
        worst = f64::max(worst, cost);
        if start < layers.len() {
            sent += layers[start - 1].output_bytes;
        }
    }
    Some(Worth { worst, sent })
}

/// Returns every balance of `n` layers over `s` stages.
pub fn compositions(n: usize, s: usize) -> Vec<Vec<usize>> {
    if s == 1 {
        return vec![vec![n]];
    }
    let firsts = 1..=n - (s - 1);
    let all = firsts.flat_map(|first| {
        compositions(n - first, s - 1).into_iter().map(move |mut rest| {
            rest.insert(0, first);
            rest
        })
    });
    all.collect()
}

fn brute_force(layers: &[Load], slots: &[Slot], goal: Goal) -> Option<Worth> {
    let all = compositions(layers.len(), slots.len());
    let worths = all.iter().filter_map(|sizes| worth(sizes, layers, slots, goal));
    worths.min_by(|a, b| a.worst.total_cmp(&b.worst).then(a.sent.cmp(&b.sent)))
}

fn instance() -> impl Strategy<Value = (Vec<Load>, Vec<Slot>, Goal)> {
    let load = (0u8..12, 0u64..20, 0u64..20, 0u64..5).prop_map(
        |(time, bytes, activation_bytes, output_bytes)| Load {
            time: f64::from(time),
            bytes,
            activation_bytes,
            output_bytes,
        },
    );
    // Speeds that are powers of two, so that equal costs are equal numbers.
    let speed = prop_oneof![Just(1.0), Just(0.5), Just(2.0)];
    let slot = (speed, proptest::option::of(1u64..120), 0u64..4)
        .prop_map(|(speed, memory, held)| Slot { speed, memory, held });
    let goal = prop_oneof![Just(Goal::Time), Just(Goal::TimeWithin), Just(Goal::Bytes)];
    (1usize..=5).prop_flat_map(move |s| {
        let layers = prop::collection::vec(load.clone(), s..=10);
        (layers, prop::collection::vec(slot.clone(), s), goal.clone())
    })
}

#[test]
fn equals_brute_force() {
    let mut runner = TestRunner::new(Config { cases: 10_000, ..Config::default() });
    let check = |(layers, slots, goal): (Vec<Load>, Vec<Slot>, Goal)| {
        let found = match goal {
            Goal::Time => balance::by_time(&layers, &slots),
            Goal::TimeWithin => balance::by_time_within(&layers, &slots),
            Goal::Bytes => balance::by_bytes(&layers, &slots),
        };
        match brute_force(&layers, &slots, goal) {
            Some(best) => {
                let found = found.unwrap();
                prop_assert_eq!(
                    worth(found.sizes(), &layers, &slots, goal),
                    Some(best),
                    "{}",
                    found
                );
            }
            None => {
                let refused = matches!(found, Err(BalanceError::DoesNotFit { .. }));
                prop_assert!(refused);
            }
        }
        Ok(())
    };
    runner.run(&instance(), check).unwrap();
}

proptest! {
    #[test]
    fn no_input_panics(
        times in prop::collection::vec(any::<f64>(), 0..12),
        bytes in any::<[u64; 3]>(),
        slots in prop::collection::vec((any::<f64>(), any::<Option<u64>>(), any::<u64>()), 0..6),
    ) {
        let [bytes, activation_bytes, output_bytes] = bytes;
        let load = |time: f64| Load { time, bytes, activation_bytes, output_bytes };
        let layers: Vec<_> = times.iter().map(|time| load(*time)).collect();
        let positive: Vec<_> = times.iter().map(|time| load(time.abs())).collect();
        let slots: Vec<_> =
            slots.into_iter().map(|(speed, memory, held)| Slot { speed, memory, held }).collect();
        let fast: Vec<_> = slots.iter().map(|slot| Slot { speed: slot.speed.abs(), ..*slot }).collect();
        for (layers, slots) in [(&layers, &slots), (&positive, &fast)] {
            let _ = balance::by_time(layers, slots);
            let _ = balance::by_bytes(layers, slots);
            let _ = balance::by_time_within(layers, slots);
        }
    }
}
